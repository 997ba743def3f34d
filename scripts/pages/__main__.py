#!/usr/bin/env python3
"""Writes every table of numbers in README.md and docs from bench/results.

    python3 scripts/pages              # writes the tables, and lists measurements that are old
    python3 scripts/pages --check      # fails when a page differs from what this would write
    python3 scripts/pages --list       # the tables: name, contents, and pages
    python3 scripts/pages --show NAME  # prints one table

A page has `<!-- table: NAME -->` and `<!-- end -->`, each on a line of its own, or inside a
sentence `<!-- value: NAME -->1.13<!-- end -->`. The script writes everything between them. fill.py
says what makes a table, results.py which line of a CSV it takes.
"""

import argparse
import inspect
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import age  # noqa: E402
import fill  # noqa: E402
import markers  # noqa: E402
from results import Results  # noqa: E402


def write(results, found):
    wrong = 0
    for fault in fill.faults(ROOT, results, found):
        if isinstance(fault, str):
            print(fault, file=sys.stderr)
            wrong = 1
        else:
            fault[0].write_text(fault[1])
            print(f"{fault[0].relative_to(ROOT)}: written")
    print(*age.report(ROOT, results.used), sep="\n")
    return wrong


def check(results, found):
    wrong = 0
    for fault in fill.faults(ROOT, results, found):
        if not isinstance(fault, str):
            page = fault[0].relative_to(ROOT)
            fault = f"{page}: a table is not what bench/results says: run make pages"
        print(fault, file=sys.stderr)
        wrong = 1
    return wrong


def show(results, found, name):
    if name not in found:
        sys.exit(f"there is no table {name}: --list names them")
    made = fill.contents(results, found, [name])[name]
    print(made if isinstance(made, str) else "\n".join(made))


def show_all(found):
    texts = {page: markers.names(page.read_text()) for page in markers.pages(ROOT)}
    for name, maker in sorted(found.items()):
        on = [str(page.relative_to(ROOT)) for page in texts if name in texts[page]]
        print(f"{name}: {' '.join(inspect.getdoc(maker).split())}")
        print(f"    on {', '.join(on) or 'no page'}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compare pages, write nothing")
    mode.add_argument("--list", action="store_true", help="name all tables")
    mode.add_argument("--show", metavar="NAME", help="print one table")
    options = parser.parse_args()
    results, found = Results(ROOT / "bench" / "results"), fill.makers()
    if options.list:
        return show_all(found)
    if options.show:
        return show(results, found, options.show)
    return check(results, found) if options.check else write(results, found)


if __name__ == "__main__":
    sys.exit(main())
