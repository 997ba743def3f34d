#!/usr/bin/env python3
"""Writes keys.csv: two channels of a model's keys, unchanged and after each step that comes before
quantisation. scripts/figures draws them.

    kvant capture -m model.gguf -f text.txt -n 1024 --layers 12 -o model.safetensors
    kvant calibrate -m model.gguf -f text.txt -n 1024 -o model.kvcal
    bench/keys.py --model NAME --capture model.safetensors --calibration model.kvcal --layer 12 \\
        --head 1 --commit $(git rev-parse --short HEAD) > bench/results/keys.csv

The channels are the one with the largest mean and the one with the largest deviation. `plain` are
keys as the model makes them. `centred` are keys minus their mean, times W. `rotated` are centred
keys after the rotation of turboquant. W is the calibration's; transform=first computes the same
matrix from the prompt."""

import csv
import pathlib
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "integrations" / "python"))

import kvant  # noqa: E402
from kvant.tuning import safetensors  # noqa: E402
from record import options_of  # noqa: E402

SKIPPED, POINTS = 64, 240  # the first tokens stay fp16; more points would cover each other
STEPS = ("plain", "centred", "rotated")


def symmetric(triangle, size):
    """The matrix whose lower triangle stands row by row."""
    matrix = np.zeros((size, size))
    matrix[np.tril_indices(size)] = triangle
    return matrix + np.tril(matrix, -1).T


def steps(keys, entry):
    """{step: rows}, all channels."""
    size = keys.shape[1]
    centred = (keys - entry.mean) @ symmetric(entry.matrix, size)
    rotated = kvant.Codec("turboquant-4", size).transform_queries(np.float32(centred))
    return dict(zip(STEPS, (keys, centred, rotated)))


def main():
    parser = options_of(__doc__)
    for name in ("model", "capture", "calibration", "commit"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("layer", "head"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    with safetensors.File(options.capture) as file:
        keys = np.asarray(file.read(f"layers.{options.layer}.k"), np.float64)[options.head]
    keys = keys[SKIPPED:]
    entry = kvant.Calibration(options.calibration).entry(options.layer, options.head, "k")
    channels = np.abs(keys.mean(0)).argmax(), keys.std(0).argmax()
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["model", "layer", "head", "step", "channels", "x", "y", "commit", "command"])
    place = [options.model, options.layer, options.head]
    for step, rows in steps(keys, entry).items():
        for row in rows[:: len(rows) // POINTS][:POINTS]:
            pair = [f"{row[channel]:.3f}" for channel in channels]
            words = "{} {}".format(*channels)
            writer.writerow([*place, step, words, *pair, options.commit, "bench/keys.py"])


if __name__ == "__main__":
    main()
