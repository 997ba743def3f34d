"""Throwaway repositories for the tests of scripts/release.py, made of files of this tree."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import version

NEEDED = (
    *sorted({name for name, _, _ in version.PLACES}),
    "CHANGELOG.md",
    "CMakeLists.txt",
    "pyproject.toml",
    "scripts/release.py",
    "scripts/version.py",
)
WHO = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "test"), ("EMAIL", "test@localhost"), ("DATE", "1700000000 +0000"))
}
# No settings of the person who runs the tests, such as signed commits.
ENVIRONMENT = (
    {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "MAKE"))}
    | WHO
    | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
)


def git(folder, *words):
    return subprocess.run(
        ["git", "-C", folder, *words], env=ENVIRONMENT, check=True, capture_output=True, text=True
    ).stdout


def tracked():
    """All files of this tree that git knows, as they lie there."""
    return [name for name in git(ROOT, "ls-files", "-z").split("\0") if (ROOT / name).is_file()]


def commit(folder, tree=NEEDED, **texts):
    """A repository with one commit of these files. `texts` replaces files of its top folder."""
    folder.mkdir(parents=True)
    names = "\0".join(tree).encode()
    packed = ["tar", "-C", ROOT, "--null", "-T", "-", "-cf", "-"]
    files = subprocess.run(packed, input=names, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-C", folder, "-xf", "-"], input=files, check=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
    git(folder, "init", "--quiet", "-b", "main")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "all files")
    return folder
