"""Downloads packages, checks their SHA-256, and moves finished files and folders into the cache.

fetch.py and fetch_python.py use these functions. This file does not know which packages there
are: fetch_pins.py does."""

import contextlib
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request


class FetchError(Exception):
    """The reason of a failure, and what the user can do about it."""

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
            f"cannot create the cache {path}: {error.strerror}",
            "set KVANT_CACHE to a folder of yours",
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
    """Downloads a package without the program npm, from the registry that npm uses, which npm's own
    variable may change."""
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
            "is the network reachable? what was fetched before stays valid; behind a proxy set "
            "https_proxy",
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
            [
                npm,
                "pack",
                "--silent",
                "--ignore-scripts",
                "--pack-destination",
                folder,
                f"{name}@{version}",
            ],
            f"download of {name}",
        )
    archive = only_file(folder, name)
    check_sha256(archive, sha256)
    return archive


def pip_download(package, folder, source=False, foreign=None):
    """Downloads a package. `foreign` is the platform and the version of another Python than the
    running one."""
    name, version, sha256 = package
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        raise FetchError(f"{sys.executable} has no pip", "install it: apt-get install python3-pip")
    folder.mkdir()
    note(f"PyPI package {name} {version}")
    # pip checks the hash too, because for a source package it runs the package's code to learn its
    # name.
    requirement = folder.with_suffix(".txt")
    requirement.write_text(f"{name}=={version} --hash=sha256:{sha256}\n")
    call(
        [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
        + (["--no-binary", name] if source else ["--only-binary", ":all:"])
        + (["--platform", foreign[0], "--python-version", foreign[1]] if foreign else [])
        + ["--require-hashes", "--dest", folder, "--requirement", requirement],
        f"download of {name}",
    )
    archive = only_file(folder, name)
    check_sha256(archive, sha256)
    return archive


def publish(made, final):
    """Moves a finished file or folder to its place. If another run was first, its result is
    used."""
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.replace(made, final)
    except OSError:
        if not final.exists():
            raise
    return final


@contextlib.contextmanager
def workspace():
    """A scratch folder on the cache's file system, so that publishing is a rename."""
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache()) as folder:
        yield pathlib.Path(folder)
