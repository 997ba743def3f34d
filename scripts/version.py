#!/usr/bin/env python3
"""Compares the places that repeat the version of kvant with CMakeLists.txt, which decides it.

    scripts/version.py            prints the version; fails if a place has another one
    scripts/version.py --write    writes the version of CMakeLists.txt into all places

A wheel, the packages of CMake and pkg-config, and `make dist` read CMakeLists.txt themselves. This
program does not write CHANGELOG.md, whose sections a person writes.
"""

import argparse
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROJECT = r"^project\(kvant VERSION (\d+)\.(\d+)\.(\d+) "
WHOLE, MAJOR, MINOR, PATCH = "{0}.{1}.{2}", "{0}", "{1}", "{2}"

# A place is a file, a pattern, and the part of the version that the second group has. kvant.h
# has plain macros, because the library can be compiled without CMake. scripts/reference.py writes
# the same line of the manual page as --write.
PLACES = (
    ("CITATION.cff", r"(^version: )(\S+)($)", WHOLE),
    ("docs/kvant.1", r'(^\.TH KVANT 1 "" "kvant )([^"]+)(" )', WHOLE),
    ("docs/start/llama.cpp-cpu.md", r"(^    kvant )([\d.]+)( \(CPU level )", WHOLE),
    ("include/kvant/kvant.h", r"(^#define KVANT_VERSION_MAJOR )(\d+)($)", MAJOR),
    ("include/kvant/kvant.h", r"(^#define KVANT_VERSION_MINOR )(\d+)($)", MINOR),
    ("include/kvant/kvant.h", r"(^#define KVANT_VERSION_PATCH )(\d+)($)", PATCH),
    ("include/kvant/kvant.h", r'(^#define KVANT_VERSION_STRING ")([^"]+)("$)', WHOLE),
)


class Wrong(Exception):
    """A version cannot be read, or differs. The text says where and what to do."""


def numbers(root):
    """Major, minor and patch of CMakeLists.txt, as strings."""
    found = re.search(PROJECT, (root / "CMakeLists.txt").read_text(), re.MULTILINE)
    if not found:
        raise Wrong("CMakeLists.txt has no line project(kvant VERSION x.y.z: write one")
    return found.groups()


def of(root):
    return WHOLE.format(*numbers(root))


def differences(root):
    """One line for each place that has another version, or none."""
    version = numbers(root)
    for name, pattern, part in PLACES:
        found = re.search(pattern, (root / name).read_text(), re.MULTILINE)
        if not found:
            yield f"{name} has no line that matches {pattern}: change PLACES in scripts/version.py"
        elif found[2] != part.format(*version):
            yield (
                f"{name} has {found[2]} where CMakeLists.txt says {part.format(*version)}: "
                "run scripts/version.py --write"
            )
    pattern = re.search(r"^regex = '(.*)'$", (root / "pyproject.toml").read_text(), re.MULTILINE)
    found = pattern and re.search(pattern[1], (root / "CMakeLists.txt").read_text())
    if not found or found["value"] != WHOLE.format(*version):
        yield (
            "pyproject.toml does not read the version of CMakeLists.txt: "
            "mend the regex in [tool.scikit-build.metadata.version]"
        )


def write(root):
    version = numbers(root)
    for name, pattern, part in PLACES:
        text = (root / name).read_text()
        changed = re.sub(
            pattern, rf"\g<1>{part.format(*version)}\g<3>", text, count=1, flags=re.MULTILINE
        )
        if changed != text:
            (root / name).write_text(changed)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the version into all places")
    try:
        if parser.parse_args().write:
            write(ROOT)
        wrong = list(differences(ROOT))
        print("\n".join(wrong) or of(ROOT))
    except Wrong as error:
        sys.exit(f"version: {error}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
