#!/usr/bin/env python3
"""How a server's first request changes the answers of later requests: runs the integration test
that measures it on models, and keeps its figures. Lines of models that the file has from this
commit stay, so the same command continues.

    bench/first_request.py build/bin/test_plugin_first_request bench/results/first_request.csv \\
        MODEL.gguf...

With quantised weights the figures differ by a quarter by chance; tests/converted_model.py makes a
model of floats. Figures of a single text differ as much: KVANT_TEST_TEXT=FILE KVANT_TEST_PIECES=N
uses N pieces of a file.

A line has the first request and the mean KL divergence of 240 later next-token distributions (per
piece) from the f16 cache, with the default preset and no calibration."""

import csv
import os
import pathlib
import re
import subprocess
import sys

import record

LINE = re.compile(
    r"after (ordinary text|none|\d+ tokens (?:of \"[^\"]*\"|in no order))(?::)? ([0-9.]+)"
)
NONE = re.compile(r"mean KLD of a first request ([0-9.]+)")


def measure(program, model):
    """The test's own bound is for the model that tests have: figures count either way."""
    done = subprocess.run(
        [program], capture_output=True, text=True, env=dict(os.environ, KVANT_TEST_MODEL=str(model))
    )
    said = done.stdout + done.stderr
    found = [("none", kld) for kld in NONE.findall(said)] + LINE.findall(said)
    if len(found) != 9:
        sys.exit(
            f"first_request: {model.name}: {len(found)} figures, and 9 are needed\n{said[-2000:]}"
        )
    about = {"machine": record.machine(), "commit": record.commit(), "command": command(program)}
    return [
        {"model": model.stem, "first_request": what.replace("\n", "\\n"), "kld_mean": kld, **about}
        for what, kld in found
    ]


def command(program):
    given = [
        f"{name}={record.short(os.environ[name])}"
        for name in ("KVANT_TEST_TEXT", "KVANT_TEST_PIECES")
        if name in os.environ
    ]
    return " ".join([*given, pathlib.Path(program).name])


def main():
    program, path = sys.argv[1], pathlib.Path(sys.argv[2])
    rows = [dict(row) for row in csv.DictReader(path.open())] if path.exists() else []
    for model in map(pathlib.Path, sys.argv[3:]):
        same = [
            row for row in rows if (row["model"], row["command"]) == (model.stem, command(program))
        ]
        if any(row["commit"] == record.commit() for row in same):
            continue
        rows = [row for row in rows if row not in same] + measure(program, model)
        record.write_rows(path, rows)


if __name__ == "__main__":
    main()
