#!/usr/bin/env python3
"""What a server's first request does to the answers of later ones: runs the integration test that measures it on models, and keeps its
figures. Rows of models that the file has from this commit stay: the same command goes on.

    bench/first_request.py build/bin/test_plugin_first_request bench/results/first_request.csv MODEL.gguf...

With quantised weights the figures differ by a quarter by chance: tests/integration/float_model.py makes a model of floats.

Rows: the first request, mean KL divergence of 240 later next-token distributions from the f16 cache, default preset, no calibration.
"""

import csv
import os
import pathlib
import re
import subprocess
import sys

import record

LINE = re.compile(r"after (ordinary text|none|\d+ tokens (?:of \"[^\"]*\"|in no order))(?::)? ([0-9.]+)")
NONE = re.compile(r"mean KLD of a first request ([0-9.]+)")


def measure(program, model):
    """The test's own bound is for the model that tests have: figures count either way."""
    done = subprocess.run([program], capture_output=True, text=True, env=dict(os.environ, KVANT_TEST_MODEL=str(model)))
    said = done.stdout + done.stderr
    found = [("none", kld) for kld in NONE.findall(said)] + LINE.findall(said)
    if len(found) != 9:
        sys.exit(f"first_request: {model.name}: {len(found)} figures, and 9 are needed\n{said[-2000:]}")
    about = {"machine": record.machine(), "commit": record.commit(), "command": pathlib.Path(program).name}
    return [{"model": model.stem, "first_request": what.replace("\n", "\\n"), "kld_mean": kld, **about} for what, kld in found]


def main():
    program, path = sys.argv[1], pathlib.Path(sys.argv[2])
    rows = [dict(row) for row in csv.DictReader(path.open())] if path.exists() else []
    for model in map(pathlib.Path, sys.argv[3:]):
        if any(row.get("model") == model.stem and row["commit"] == record.commit() for row in rows):
            continue
        rows = [row for row in rows if row.get("model") not in (None, model.stem)] + measure(program, model)
        record.write_rows(path, rows)


if __name__ == "__main__":
    main()
