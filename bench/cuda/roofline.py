#!/usr/bin/env python3
"""Prints all shapes and codecs with the share of a copy's speed that each call reaches.

The table has the time of a call, and the part of it that its bytes would take at the speed of a
copy in the same process.

    bench/cuda/roofline.py bench/results/cuda_attention.csv bench/results/cuda_append.csv"""

import argparse
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pages"))
from results import Results  # noqa: E402
from text import table_of  # noqa: E402


def read(path):
    return Results(path.parent).lines(path.name)


def copy_bandwidth(rows):
    """GB/s of the copy that append was compared with; rows of many bytes have the most digits."""
    return statistics.median(
        float(r["GB/s"]) / float(r["fraction of copy"])
        for r in rows
        if float(r["fraction of copy"]) > 0.2
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("attention", type=pathlib.Path, help="cuda_attention.csv")
    parser.add_argument(
        "append", type=pathlib.Path, help="cuda_append.csv, for the speed of the copy"
    )
    args = parser.parse_args()
    copy = copy_bandwidth(read(args.append))
    cells, codecs = {}, []
    for row in read(args.attention):
        shape = ", ".join(
            row[name] for name in ("batch", "heads", "kv_heads", "head_dim", "tokens")
        )
        if row["codec"] not in codecs:
            codecs.append(row["codec"])
        cells.setdefault(shape, {})[row["codec"]] = (
            f"{float(row['us']):.0f} us, {float(row['GB/s']) / copy:.0%}"
        )
    print(f"Copy: {copy / 1e3:.2f} TB/s.\n")
    print(*table_of("batch, q heads, kv heads, head_dim, tokens", codecs, cells), sep="\n")


if __name__ == "__main__":
    main()
