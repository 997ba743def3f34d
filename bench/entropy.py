#!/usr/bin/env python3
"""How much smaller an entropy coder would make sealed pages, for stores.

    kvant capture -m model.gguf -f text.txt -n 1024 -c 1024 -o model.safetensors
    bench/entropy.py --model NAME --capture model.safetensors [--csv bench/results/entropy.csv]

Pages of all layers and kv heads follow one another. `halves` is the entropy of half bytes relative
to 4 bits, which bounds a coder that knows how frequent each is. `lzma` is a real coder that also
finds repetitions. Values are parts of the size. Needs NumPy and kvant."""

import csv
import lzma
import pathlib

import kvant
import numpy as np

from record import commit, machine, options_of
from steering import tensors

SPECS = "int-4", "int-8", "turboquant-4", "trellis-4", "trellis-3", "trellis-2"
TOKENS = 64


def pages(capture, spec, role):
    for name, rows in tensors(capture):
        if name.endswith("." + role):
            codec = kvant.Codec(spec, rows.shape[-1], role=role)
            for head in rows.astype(np.float32):
                for at in range(0, len(head) - TOKENS + 1, TOKENS):
                    yield bytes(codec.encode(np.ascontiguousarray(head[at : at + TOKENS])))


def halves(data):
    codes = np.frombuffer(data, np.uint8)
    share = np.bincount(np.concatenate([codes & 15, codes >> 4]), minlength=16) / (2 * len(codes))
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum() / 4)


def main():
    parser = options_of(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--capture", required=True, type=pathlib.Path)
    parser.add_argument(
        "--csv", type=pathlib.Path, default=pathlib.Path("bench/results/entropy.csv")
    )
    arguments = parser.parse_args()
    new = not arguments.csv.exists()
    with arguments.csv.open("a", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        if new:
            table.writerow(
                ["model", "spec", "role", "bytes", "halves", "lzma", "machine", "commit", "command"]
            )
        for spec in SPECS:
            for role in "kv":
                data = b"".join(pages(arguments.capture, spec, role))
                row = [
                    arguments.model,
                    spec,
                    role,
                    len(data),
                    halves(data),
                    len(lzma.compress(data, preset=9)) / len(data),
                ]
                table.writerow(
                    row + [machine(), commit(), f"bench/entropy.py --model {arguments.model}"]
                )
                print(*row)


if __name__ == "__main__":
    main()
