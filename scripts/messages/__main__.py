#!/usr/bin/env python3
"""Writes docs/reference/messages.md: every message that a user of kvant can see.

    python3 scripts/messages            # writes the page
    python3 scripts/messages --check    # fails when the page is not what this would write
    python3 scripts/messages --print    # prints the messages, one a line, with file and rule broken

c_source.py and python_source.py find messages, house_style.py has the rules that they keep.
"""

import argparse
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import collect  # noqa: E402
import house_style  # noqa: E402
import page  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--print", action="store_true")
    given = parser.parse_args()
    found, unknown = collect.everything(ROOT)
    if given.print:
        for door in found.values():
            for message in door:
                part = "part" if message.is_part else ""
                faults = "; ".join(house_style.faults(message))
                print(message.file, part, message.text, faults, sep="\t")
    for file, function, text in unknown:
        print(f'{file}: {function}("{text}"): c_source.py does not know whether this is a message')
    content, path = page.written(found), ROOT / page.PATH
    current = path.read_text() if path.exists() else ""
    if given.check and content != current:
        print(f"{page.PATH} is not what the sources say: python3 scripts/messages writes it")
        return 1
    if not given.check and not given.print and content != current:
        path.write_text(content)
        print(f"{page.PATH} written")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
