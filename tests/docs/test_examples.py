#!/usr/bin/env python3
"""Every function of a stable public header has an example. A program of examples/, which the tests
compile and run, calls it, or a block of commands or code on a page of docs/ does."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def stable():
    """{function: header} of the headers that do not call themselves unstable."""
    found = {}
    for header in sorted((ROOT / "include/kvant").glob("*.h")):
        text = header.read_text()
        if " - unstable: " not in text.split("\n", 1)[0]:
            for name in re.findall(r"KVANT_API [^;(]*?(kvant_\w+)\(", text):
                found[name] = header.name
    assert len(found) > 100, "this check finds too few functions"
    return found


def examples():
    programs = "".join(path.read_text() for path in (ROOT / "examples").glob("*.[ch]"))
    programs = re.sub(r"/\*.*?\*/", "", programs, flags=re.S)
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    blocks = (re.findall(r"^```.*?^```", page.read_text(), re.S | re.M) for page in pages)
    return programs + "".join(sum(blocks, []))


called = set(re.findall(r"\b(kvant_\w+)\(", examples()))
without = {name: header for name, header in stable().items() if name not in called}
for name, header in without.items():
    print(f"{header}: {name} has no example in examples/ or docs/")
sys.exit(1 if without else 0)
