#!/usr/bin/env python3
"""Prints bench/results/quality.csv as Markdown tables, one per model, best first.

    bench/quality_table.py bench/results/quality.csv

True bits are those of the pages; bits of the cache count all memory it had at the end of the context, windows too.
"""

import argparse
import csv
import pathlib


def name(row):
    keys, values = row["k"], row["v"]
    text = f"`{keys}`" if keys == values else f"`{keys}` / `{values}`"
    if row["cache"] == "llama.cpp":
        text = "llama.cpp " + text
    if row.get("protect") not in ("", "0", None):
        text += f", `--protect {row['protect']}`"
    return text


def cache_bits(row, f16):
    return 16 * float(row["kv_bytes"]) / float(f16["kv_bytes"])


def table(rows):
    f16 = next(row for row in rows if row["cache"] == "llama.cpp" and row["k"] == "f16")
    others = sorted((row for row in rows if row is not f16), key=lambda row: float(row["kld_mean"]))
    yield "| keys / values | true bits | bits of the cache | mean KLD | +- | top-1 % | perplexity |"
    yield "|---|---|---|---|---|---|---|"
    for row in [f16] + others:
        yield (f"| {name(row)} | {float(row['bits']):.2f} | {cache_bits(row, f16):.2f} | "
               f"{max(float(row['kld_mean']), 0):.4f} | {float(row['kld_se']):.4f} | {100 * float(row['top1']):.1f} | "
               f"{float(row['ppl']):.2f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=pathlib.Path)
    with open(parser.parse_args().csv, newline="") as file:
        rows = list(csv.DictReader(file))
    for model in dict.fromkeys(row["model"] for row in rows):
        print(f"\n## {model}\n")
        print("\n".join(table([row for row in rows if row["model"] == model])))


if __name__ == "__main__":
    main()
