#!/usr/bin/env python3
"""No line of code is wider than 100 columns, no file of code longer than 600 lines.

tree.txt lists what still exceeds this: per file the lines that are too wide, and the length of the
file if it is too long. A file may neither have more than the list says nor less: a smaller number
has to be written into the list, so it can only shrink. `test_tree.py --write` writes it again.

An executable file is a script. Any other one is the output of a compiler, added by mistake."""

import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIST = HERE / "tree.txt"
WIDTH, LENGTH = 100, 600
CODE = re.compile(r"\.(c|h|cu|cuh|cpp|hpp|py|sh|js|cmake|in)$|(^|/)(CMakeLists\.txt|Makefile)$")


def tracked():
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [name for name in names.stdout.splitlines() if CODE.search(name)]


def excess():
    """{file: (lines that are too wide, lines if there are too many)} of files with any."""
    found = {}
    for name in tracked():
        path = ROOT / name
        if not path.is_file() or path.is_symlink():
            continue
        lines = path.read_text(errors="replace").splitlines()
        wide = sum(len(line) > WIDTH for line in lines)
        long = len(lines) if len(lines) > LENGTH else 0
        if wide or long:
            found[name] = wide, long
    return found


def outputs():
    """Executable files that are no scripts."""
    lines = subprocess.run(
        ["git", "ls-files", "-s"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    names = [line.split("\t")[1] for line in lines if line.startswith("100755")]
    assert len(names) > 30, "this check finds too few executable files"
    return [
        name
        for name in names
        if (ROOT / name).is_file() and (ROOT / name).read_bytes()[:2] != b"#!"
    ]


def listed():
    rows = (line.split() for line in LIST.read_text().splitlines())
    return {name: (int(wide), int(long)) for name, wide, long in rows}


def main():
    if not (ROOT / ".git").exists():
        print("not a checkout: files of the tree are not known")
        return 77
    found = excess()
    if sys.argv[1:] == ["--write"]:
        LIST.write_text("".join(f"{name} {w} {n}\n" for name, (w, n) in sorted(found.items())))
        return 0
    known, wrong = listed(), 0
    assert len(tracked()) > 500, "this check finds too few files"
    for name in sorted(found.keys() | known.keys()):
        is_, was = found.get(name, (0, 0)), known.get(name, (0, 0))
        for what, now, then in zip(("lines above 100 columns", "lines"), is_, was):
            if now > then:
                print(f"{name}: {now} {what}, {then} in {LIST.name}: shorten the file")
            elif now < then:
                print(f"{name}: {now} {what}, {then} in {LIST.name}: run test_tree.py --write")
            wrong += now != then
    for name in outputs():
        print(f"{name}: an executable file that is no script: remove it")
        wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
