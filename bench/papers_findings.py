#!/usr/bin/env python3
"""Findings of docs/evidence/papers.md that need no model: rows of random numbers and the package
only.

    bench/papers_findings.py -o bench/results/papers_findings.csv [--keys FILE.safetensors]...

Rows are 128 channels of normal numbers, 4096 rows in all. D is the squared error over the squares
of the counted numbers. --keys: HQMQ's Figure 7, of keys in a file of `kvant capture`."""

import csv
import datetime
import functools
import pathlib

import numpy as np
from record import commit, first_line, machine, options_of

from kvant.codec import Codec
from kvant.tuning import safetensors

DIM, ROWS, SEEDS = 128, 4096, 4


def normal(seed):
    return np.random.RandomState(seed).standard_normal((ROWS, DIM)).astype(np.float32)


def error(spec, rows, counted, seed):
    """D of the counted channels, and the codec's true bits."""
    codec = Codec(spec, DIM, "k", seed=seed)
    lost = codec.decode(codec.encode(rows), len(rows)).astype(float) - rows
    wanted = rows[:, counted].astype(float)
    return (lost[:, counted] ** 2).sum() / (wanted**2).sum(), codec.true_bits


def true_bits():
    """OCTOPUS compared with a mixture of two widths of TurboQuant with the same true bits: heads or
    layers of either width."""
    whole = slice(None)
    for b in (2, 3, 4):
        low = f"turboquant-{b}:scale=norm"
        high = f"turboquant-{b + 1}:scale=norm"
        triplets = f"octopus-{b}:scale=norm"
        found = {
            spec: [error(spec, normal(s), whole, s) for s in range(SEEDS)]
            for spec in (low, high, triplets)
        }
        d = {spec: np.mean([x for x, _ in of]) for spec, of in found.items()}
        bits = {spec: of[0][1] for spec, of in found.items()}
        share = (bits[triplets] - bits[low]) / (bits[high] - bits[low])
        yield triplets, "all", bits[triplets], d[triplets]
        yield f"{low} and {high}", "all", bits[triplets], (1 - share) * d[low] + share * d[high]


def two_large_channels():
    """HQMQ's ablation: the error of the smaller channels, with outliers kept apart or not."""
    large = (30, 94)
    counted = [j for j in range(DIM) if j // 4 not in [channel // 4 for channel in large]]
    paper = "book=random,scale=norm"
    specs = ["int-4:sym", "naive-4:range=all", "naive-4"]
    for name in ("s24r6", "s96r6"):
        specs += [f"hqmq-{name}:{paper}"] + [
            f"hqmq-{name}:{paper},med3,median=page{rest}" for rest in (",range=all", "")
        ]
    for spec in specs:
        found = []
        for seed in range(SEEDS):
            rows = normal(seed)
            rows[:, large] *= 200
            found.append(error(spec, rows, counted, seed))
        yield (
            spec,
            "two channels 200 times as large; the others",
            found[0][1],
            np.mean([x for x, _ in found]),
        )


def constant_part():
    """Keys with a constant part, which softmax ignores: the error, over the squares of the part
    that varies."""
    constant = 4 * np.random.RandomState(99).standard_normal(DIM).astype(np.float32)
    for spec in (
        "int-4",
        "bdr-4",
        "turboquant-4",
        "octopus-4",
        "hqmq-s192r6",
        "trellis-4",
        "int-4:axis=channel,group=64",
    ):
        for name, shift in (
            ("none", 0),
            ("4 standard deviations", 1),
            ("the same, its mean subtracted", 2),
        ):
            found = []
            for seed in range(SEEDS):
                varying = normal(seed)
                rows = varying + constant * np.float32(shift > 0)
                rows -= rows.mean(0) * np.float32(shift == 2)
                codec = Codec(spec, DIM, "k", seed=seed)
                lost = codec.decode(codec.encode(rows), len(rows)).astype(float) - rows
                found.append(
                    ((lost**2).sum() / (varying.astype(float) ** 2).sum(), codec.true_bits)
                )
            yield spec, f"constant part: {name}", found[0][1], np.mean([x for x, _ in found])


def bandwidth():
    """HQMQ Table 5: bytes of an fp16 cache of 8 kv heads x 128 over the printed time, in TB/s."""
    for tokens, milliseconds in ((4096, 0.013), (16384, 0.014), (32768, 0.014)):
        yield (
            f"f16, {tokens} tokens",
            "TB/s that HQMQ Table 5 implies; an RTX 4090 has 1.0",
            16,
            tokens * 8 * 128 * 2 * 2 / milliseconds / 1e9,
        )


def errors_by_product():
    """TurboQuant Figure 5: the variance of inner products' errors, times head_dim, by the product
    of unit vectors; 2 bits."""
    for spec in ("turboquant-2:scale=norm", "turboquant-2:qjl,sketch=gaussian"):
        for product in (0.0, 0.06, 0.12, 0.18):
            found, bits = [], 0
            for seed in range(4 * SEEDS):
                rows = normal(seed).astype(float)
                query = np.random.RandomState(1000 + seed).standard_normal(DIM)
                query /= np.linalg.norm(query)
                rows -= np.outer(rows @ query, query)
                rows *= np.sqrt(1 - product**2) / np.linalg.norm(rows, axis=1, keepdims=True)
                rows = (rows + product * query).astype(np.float32)
                codec = Codec(spec, DIM, "k", seed=seed)
                lost = (codec.decode(codec.encode(rows), ROWS).astype(float) - rows) @ query
                found.append(DIM * lost.var())
                bits = codec.true_bits
            yield (
                spec,
                f"d x variance of the error of an inner product of {product}",
                bits,
                np.mean(found),
            )


def key_chunks(path):
    """HQMQ Figure 7: norms of chunks of 4 channels over their head's median. The largest head of
    each layer counts."""
    largest, tail = [], []
    with safetensors.File(path) as file:
        for name in (name for name in file.tensors if name.endswith(".k")):
            keys = file.read(name).astype(float)
            norms = np.linalg.norm(keys.reshape(len(keys), -1, 4), axis=2)
            ratios = norms / np.median(norms, axis=1, keepdims=True)
            largest.append(ratios.max())
            tail.append(np.quantile(ratios, 0.999))
    name = pathlib.Path(path).stem
    yield name, "largest chunk of keys over the median, largest layer", 16, max(largest)
    yield name, "the same, median of layers", 16, np.median(largest)
    yield name, "99.9th percentile over the median, median of layers", 16, np.median(tail)
    yield name, "share of layers with a chunk above 3 medians", 16, np.mean(np.array(largest) > 3)


FINDINGS = {
    "true bits": true_bits,
    "two large channels": two_large_channels,
    "constant part": constant_part,
    "errors by product": errors_by_product,
    "bandwidth": bandwidth,
}


def main():
    parser = options_of(__doc__)
    parser.add_argument("-o", "--output", help="CSV to write, too")
    parser.add_argument(
        "--keys",
        action="append",
        default=[],
        metavar="FILE",
        help="from kvant capture -n 1024 -c 1024; may be repeated",
    )
    given = parser.parse_args()
    about = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "compiler": first_line("cc", "--version"),
        "commit": commit(),
        "command": "bench/papers_findings.py",
    }
    rows = []
    captured = [("key chunks", functools.partial(key_chunks, path)) for path in given.keys]
    for name, measure in [*FINDINGS.items(), *captured]:
        for what, where, bits, figure in measure():
            print(f"{name:18}  {what:58}  {where:44}  {bits:6.3f}  {figure:.4f}", flush=True)
            rows.append(
                {
                    "finding": name,
                    "what": what,
                    "where": where,
                    "bits": bits,
                    "figure": figure,
                    **about,
                }
            )
    if given.output:
        with open(given.output, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
