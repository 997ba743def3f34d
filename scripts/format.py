#!/usr/bin/env python3
"""Lays out all C, CUDA and Python of this repository: clang-format and ruff, in pinned versions.

With --check it changes nothing and exits with 1 if a file is laid out otherwise. Comments are not
touched: where a comment's line breaks is for the person who writes it, and tests/docs/test_tree.py
checks its width.
"""

import argparse
import pathlib
import subprocess
import sys

import fetch

C = ("*.c", "*.h", "*.cu", "*.cuh", "*.cpp")
ROOT = pathlib.Path(__file__).resolve().parent.parent


def tracked(*patterns):
    listed = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, list what differs")
    check = parser.parse_args().check
    programs = fetch.fetch_format()
    # The environment was moved after it was made, so the first line of its scripts names a Python
    # that is not there.
    clang = [
        programs / "python",
        programs / "clang-format",
        *(["--dry-run", "--Werror"] if check else ["-i"]),
    ]
    ruff = [programs / "ruff", "format", "--quiet", *(["--check"] if check else [])]
    codes = [
        subprocess.run([*command, *tracked(*patterns)], cwd=ROOT).returncode
        for command, patterns in ((clang, C), (ruff, ["*.py"]))
    ]
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
