#!/usr/bin/env python3
"""Draws the figures of README and docs from bench/results, as docs/figures/NAME-light.svg and
NAME-dark.svg.

    python3 scripts/figures            # writes all
    python3 scripts/figures --check    # fails when a file differs from what this would draw

A figure is a module of scripts/figures/drawings: draw(theme, results) returns a draw.Canvas.
Figures and tables (scripts/pages) take the same lines of results.
"""

import argparse
import importlib
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "scripts" / "pages")]

import draw  # noqa: E402
from results import Results  # noqa: E402

FOLDER = ROOT / "docs" / "figures"


def figures():
    """{path of the file: its text}"""
    results, files = Results(ROOT / "bench" / "results"), {}
    for file in sorted((HERE / "drawings").glob("*.py")):
        drawing = importlib.import_module(f"drawings.{file.stem}")
        for theme in draw.THEMES:
            canvas = drawing.draw(theme, results)
            files[FOLDER / f"{file.stem}-{theme}.svg"] = "\n".join(canvas.lines()) + "\n"
    return files


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare files, write nothing")
    check, wrong = parser.parse_args().check, 0
    for path, text in figures().items():
        if path.exists() and path.read_text() == text:
            continue
        if check:
            print(f"{path.relative_to(ROOT)} is not what bench/results says: run make pictures")
            wrong = 1
        else:
            path.write_text(text)
            print(f"{path.relative_to(ROOT)}: written")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
