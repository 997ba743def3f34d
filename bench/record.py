#!/usr/bin/env python3
"""Runs a kvant command that prints --json and keeps its results as CSV, with everything that is
needed to judge and repeat them.

    bench/record.py bench/results/quality.csv -- build/bin/kvant eval -m model.gguf \\
        -f text.txt ... --json

Every line gets date, machine, compiler, commit and command; --set model=SmolLM2 puts a column of
that name first. The file is replaced as a whole by one rename. With --append it keeps its lines;
columns that only the new lines have are empty in the old ones."""

import argparse
import csv
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys


def first_line(*command):
    try:
        return (
            subprocess.run(command, capture_output=True, text=True, check=True)
            .stdout.splitlines()[0]
            .strip()
        )
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def machine():
    model = "unknown CPU"
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model}, {os.cpu_count()} threads"


def commit():
    name = first_line("git", "rev-parse", "--short", "HEAD")
    dirty = subprocess.run(
        ["git", "diff", "--quiet", "HEAD", "--", "src", "tools", "integrations"]
    ).returncode
    return name + ("+changes" if dirty else "")


def model_name(path):
    """A model's name as CSVs have it, from the name of its file."""
    return re.split(r"\.(?:Q\d|F16)", path.name)[0].removesuffix("-Instruct")


def options_of(words):
    """A parser of arguments, whose help begins with these words as they are."""
    return argparse.ArgumentParser(
        description=words, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def short(argument):
    """Paths of this machine say nothing elsewhere: files keep their names only."""
    return os.path.basename(argument) if "/" in argument else argument


def portable(row):
    return {
        key: os.path.basename(value) if str(value).startswith("/") else value
        for key, value in row.items()
    }


def read_rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path, rows):
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(path)


def together(old, new):
    """The old rows and the new ones with the columns of the new, or None when those lack one of the
    old columns: then the rows are another command's.
    """
    if old and not set(old[0]) <= set(new[0]):
        return None
    return [{name: row.get(name, "") for name in new[0]} for row in old] + new


def context(command):
    """The columns that every line ends with."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "compiler": first_line("cc", "--version"),
        "commit": commit(),
        "command": " ".join(short(argument) for argument in command),
    }


def append(path, rows):
    """Appends rows to a CSV, which may be new. False when the file has other columns: then the rows
    are in a file next to it, because minutes of measuring are not thrown away.
    """
    joined = together(read_rows(path), rows) if path.exists() else rows
    write_rows(path.with_suffix(".new.csv") if joined is None else path, joined or rows)
    return joined is not None


def main():
    parser = options_of(__doc__)
    parser.add_argument("--append", action="store_true", help="keep the rows that the file has")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a column for all rows"
    )
    parser.add_argument("csv", type=pathlib.Path)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND ... --json")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if "--json" not in command:
        parser.error("the command must have --json")
    if not all("=" in pair for pair in arguments.set):
        parser.error("--set takes KEY=VALUE")
    result = subprocess.run(command, stdout=subprocess.PIPE)
    if result.returncode != 0:
        sys.exit(
            f"record: the command failed with exit code {result.returncode}; nothing was written"
        )
    first = dict(pair.split("=", 1) for pair in arguments.set)
    rows = [{**first, **portable(row), **context(command)} for row in json.loads(result.stdout)]
    if not rows:
        sys.exit("record: the command printed no rows; nothing was written")
    if not arguments.append:
        write_rows(arguments.csv, rows)
    elif not append(arguments.csv, rows):
        sys.exit(f"record: {arguments.csv} has other columns; the rows are in *.new.csv")
    print(f"record: {len(rows)} rows in {arguments.csv}", file=sys.stderr)


if __name__ == "__main__":
    main()
