#!/usr/bin/env python3
"""Asks every door of kvant for every codec of asked.py, and compares the answers with
bench/results/doors.csv, which the table of doors is made from.

    test_doors.py plain|torch              fails when an answer is not the one of the CSV
    test_doors.py plain|torch --write CSV  replaces the answers of these doors (`make doors`)

plain: doors.py. torch: torch_doors.py; PYTHONPATH has vLLM for its doors.
Environment: DOORS_PROBE, DOORS_MODEL and DOORS_MOCK (of tests/integration), KVANT_LIBRARY, and
KVANT_CUDA_LIBRARY, the mock of a GPU."""

import argparse
import csv
import importlib
import pathlib
import sys
import tempfile

import asked

CSV = pathlib.Path(__file__).resolve().parents[2] / "bench" / "results" / "doors.csv"
COLUMNS = ["codec", "door", "answer"]
ORDER = (
    "libkvant, CPU",
    "libkvant, GPU",
    "llama.cpp, CPU",
    "llama.cpp, GPU",
    "transformers, CPU",
    "vLLM, CPU",
    "vLLM, GPU",
    "LMCache",
    "search",
)
# docs/evidence/papers.md: "All codecs run in C, in Python and in llama.cpp on a CPU."
EVERY_CODEC = ("libkvant, CPU", "llama.cpp, CPU", "transformers, CPU")


def answers(doors):
    """{(codec, door): "" or the words of its refusal}"""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for one in asked.all_asked(folder):
            for name, ask in doors.items():
                try:
                    answer = ask(one)
                except (RuntimeError, ValueError, NotImplementedError) as error:
                    answer = str(error)
                found[one.name, name] = answer.replace(folder, "")
    return found


def known():
    if not CSV.exists():
        return {}
    with open(CSV, newline="") as file:
        return {(line["codec"], line["door"]): line["answer"] for line in csv.DictReader(file)}


def write(path, found):
    """Keeps the answers of doors that were not asked now."""
    lines = known() | found
    keys = [(codec, door) for codec in asked.SPECS for door in ORDER]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([*key, lines[key]] for key in keys if key in lines)


def faults(found, doors):
    """A line for each thing that is wrong."""
    yield from (f"no codec of asked.py is of the family {name}" for name in asked.families())
    old = {key: answer for key, answer in known().items() if key[1] in doors}
    for codec, door in sorted(old.keys() | found.keys()):
        now, was = found.get((codec, door)), old.get((codec, door))
        if now != was:
            yield f"{codec}, {door}: {now!r} now, {was!r} in doors.csv: run make doors, make pages"
        if now and door in EVERY_CODEC:
            yield f"{codec}, {door}: {now}; docs/evidence/papers.md says that all codecs run there"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("plain", "torch"))
    parser.add_argument("--write", metavar="CSV", help="write the answers instead")
    given = parser.parse_args()
    doors = importlib.import_module({"plain": "doors", "torch": "torch_doors"}[given.kind]).DOORS
    found = answers(doors)
    if given.write:
        return write(given.write, found)
    wrong = list(faults(found, doors))
    print(f"{len(found)} answers, {len(wrong)} wrong", *wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
