"""Fetches and builds the programs of systems.py, and says with which words one starts them. Sources
are fetched by git at their pinned commits and built unmodified.

RIVALS_GIT_BASE: a folder of bare repositories that replaces the public addresses, for machines
without a network. Their objects are read where they lie."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

from systems import HOSTS, PROGRAMS

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from fetch_download import FetchError, pip_download  # noqa: E402
from fetch_pins import API3_VERSION, LLAMA_COMMIT, LLAMA_VERSION  # noqa: E402

TARGETS = ("llama-perplexity", "llama-bench")
# Folders of the sources of programs that are linked with prebuilt libraries.
LINKED = ("perplexity", "sweep-bench")
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
)
# All pairs of types, which includes the caches that only the fork has.
CUDA = ("-DGGML_CUDA=ON", "-DGGML_CUDA_FA_ALL_QUANTS=ON")
# The llama.cpp that bench/llama_cuda/build.sh builds.
CUDA_VERSION = f"b{API3_VERSION.split('.')[0]}"


class BuildError(Exception):
    """A program cannot be had; the text says why."""


def run(words, log, **more):
    with open(log, "a") as file:
        if subprocess.run(words, stdout=file, stderr=file, **more).returncode != 0:
            raise BuildError(f"{' '.join(map(str, words[:4]))} failed: {log} says why")


def fetch(name, source, log):
    """The program's source at its commit in the folder source."""
    pinned, git = PROGRAMS[name], ["git", "-C", source]
    source.mkdir(parents=True, exist_ok=True)
    run([*git, "init", "--quiet"], log)
    if base := os.environ.get("RIVALS_GIT_BASE"):
        alternates = source / ".git" / "objects" / "info" / "alternates"
        alternates.write_text(f"{pathlib.Path(base, name).resolve() / 'objects'}\n")
    else:
        run([*git, "fetch", "--quiet", "--depth", "1", pinned.address, pinned.commit], log)
    # Without models for tests and web pages of servers, which nothing here needs.
    words = ["sparse-checkout", "set", "--no-cone", "/*", "!/models", "!webui*", "!public"]
    run([*git, *words], log)
    run([*git, "-c", "advice.detachedHead=false", "checkout", "--force", pinned.commit], log)


def without_amx():
    """Options of ggml that name what this CPU has, apart from AMX. Some virtual machines report AMX
    and stop programs that use it."""
    if "amx_tile" not in pathlib.Path("/proc/cpuinfo").read_text():
        return ()
    names = ("AVX2", "FMA", "F16C", "BMI2", "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16")
    return ("-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in names))


def unpack_libraries(name, source, made):
    """Puts the libraries of the program's wheel into the folder made, with the names by which they
    find each other."""
    package = PROGRAMS[name].wheel
    shutil.rmtree(source / "wheel", ignore_errors=True)
    with zipfile.ZipFile(pip_download(package, source / "wheel")) as wheel:
        for member in wheel.namelist():
            path = pathlib.PurePosixPath(member)
            if path.parent.name.endswith(".libs"):
                (made / path.name).write_bytes(wheel.read(member))


def link_programs(name, source, made, log):
    """Compiles the programs and the sources that they share, and links the wheel's libraries."""
    unpack_libraries(name, source, made)
    info = source / "build-info.cpp"
    info.write_text(
        f'int LLAMA_BUILD_NUMBER = 0;\nconst char *LLAMA_COMMIT = "{PROGRAMS[name].commit[:9]}";\n'
        'const char *LLAMA_COMPILER = "c++";\nconst char *LLAMA_BUILD_TARGET = "CPU";\n'
    )
    include = ("include", "ggml/include", "src", "ggml/src", "common", "vendor")
    flags = ["-std=c++20", "-O1", "-DNDEBUG", *(f"-I{source / folder}" for folder in include)]
    shared = [info, *sorted((source / "common").glob("*.cpp"))]
    shared += sorted((source / "common" / "jinja").glob("*.cpp"))
    programs = {f"llama-{x}": source / "examples" / x / f"{x}.cpp" for x in LINKED}
    objects = {}
    for unit in [*shared, *programs.values()]:
        objects[unit] = made / f"{unit.parent.name}-{unit.stem}.o"
        if not objects[unit].exists():
            run(["c++", *flags, "-c", unit, "-o", objects[unit]], log)
    libraries = [f"-l:{path.name}" for path in sorted(made.glob("*.so*"), reverse=True)]
    for target, unit in programs.items():
        words = [objects[unit], *(objects[unit] for unit in shared), "-o", made / target]
        words += [f"-L{made}", *libraries, f"-Wl,--disable-new-dtags,-rpath,{made}", "-lpthread"]
        run(["c++", *words], log)


def compile_program(source, made, log, jobs, gpu):
    options = [*OPTIONS, *without_amx(), *(CUDA if gpu else ())]
    run(["cmake", "-S", source, "-B", made.parent, *options], log)
    run(["cmake", "--build", made.parent, f"-j{jobs}", "--target", *TARGETS], log)


def build(name, work, jobs):
    """The folder with the program's binaries."""
    source = work / name
    made = source / "build" / "bin"
    wheel = PROGRAMS[name].wheel
    targets = [f"llama-{target}" for target in LINKED] if wheel else TARGETS
    if all((made / target).exists() for target in targets):
        return made
    made.mkdir(parents=True, exist_ok=True)
    log = work / f"{name}.build.log"
    print(f"building {name}: 5 to 30 minutes on 2 cores", file=sys.stderr)
    fetch(name, source, log)
    try:
        if wheel:
            link_programs(name, source, made, log)
        else:
            compile_program(source, made, log, jobs, PROGRAMS[name].gpu)
    except FetchError as error:
        raise BuildError(str(error))
    return made


def folder(name, work, jobs):
    """The folder of the binaries of a program, which is built when it is missing."""
    if HOSTS.get(name, name) != "llama.cpp":
        return build(name, work, jobs)
    words = [sys.executable, ROOT / "scripts" / "fetch.py", "programs"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise BuildError("llama.cpp's programs cannot be fetched")
    return pathlib.Path(done.stdout.strip())


def version(name):
    """The commit of the program, as the CSV names it."""
    if name in PROGRAMS:
        return PROGRAMS[name].commit[:12]
    return f"{LLAMA_VERSION} {LLAMA_COMMIT[:12]}"


def start(system, binary, kvant):
    """The words that start a binary with the system's cache."""
    if system.program == "kvant":
        return [kvant, "exec", *system.words, "--", binary]
    return [binary, *system.words]
