#!/usr/bin/env python3
"""How many bits a store of states could save by transforms over several heads and layers, compared
with a transform per head, at the same error. A bound for Gaussian coefficients, not a codec.

    kvant capture -m model.gguf -f text.txt -n 12288 -c 1024 --spread 12 --queries 16 -o FILE
    bench/state_codec.py --model NAME --capture FILE --context 1024 --rope 100000,pairs \\
        [--csv bench/results/state_codec.csv]

Every head is scaled to the same energy. A transform is the eigenvectors of the covariance of the
even contexts; bits are counted on the odd ones. Coefficients get bits by reverse water-filling, so
weak ones get none. The mean squared error is that of `--bits` per number with a transform per head.
`keys` are as RoPE leaves them, `plain keys` are rotated back by RoPE. Needs NumPy."""

import csv
import pathlib
import sys
import time

import numpy as np

from record import context, options_of
from steering import tensors

GROUPS = {"head": 0, "layer": 1, "4 layers": 4, "all layers": 10**6}


def rotated_back(keys, context, base, style):
    """Keys [heads, tokens, head_dim] without RoPE."""
    dim = keys.shape[-1]
    angles = np.arange(keys.shape[1])[:, None] % context * base ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angles), np.sin(angles)
    halves = slice(0, dim // 2), slice(dim // 2, dim)
    first, second = (slice(0, dim, 2), slice(1, dim, 2)) if style == "pairs" else halves
    made = np.empty_like(keys)
    a, b = keys[..., first], keys[..., second]
    made[..., first], made[..., second] = a * cos + b * sin, b * cos - a * sin
    return made


def rate(variances, error):
    """Mean bits per coefficient for a mean squared error (reverse water-filling)."""
    low, high = 0.0, float(variances.max())
    for _ in range(100):
        level = (low + high) / 2
        low, high = (level, high) if np.minimum(variances, level).mean() < error else (low, level)
    return float(np.log2(np.maximum(variances / level, 1)).mean() / 2), float(
        (variances > level).mean()
    )


def error_at(variances, bits):
    low, high = 0.0, float(variances.mean())
    for _ in range(60):
        error = (low + high) / 2
        low, high = (error, high) if rate(variances, error)[0] > bits else (low, error)
    return error


def spectrum(fit, test):
    """Variances of test rows on the eigenvectors of other rows, and the milliseconds per token that
    the transform takes."""
    vectors = np.linalg.eigh(fit.T @ fit / len(fit))[1].astype(np.float32)
    begun = time.perf_counter()
    found = test @ vectors
    return (found.astype(np.float64) ** 2).mean(0), 1e3 * (time.perf_counter() - begun) / len(test)


def parts_of(rows, size):
    """The rows of each transform's coefficients: [tokens, coefficients]."""
    if size == 0:
        return [head for x in rows for head in x]
    groups = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [np.concatenate([head for x in group for head in x], axis=1) for group in groups]


def measure(layers, context, all_bits):
    """layers: a list of [heads, tokens, head_dim]. Yields a result per transform and bits."""
    odd = np.arange(layers[0].shape[1]) // context % 2 == 1
    rows = []
    for x in layers:
        x = x - x[:, ~odd].mean(1, keepdims=True)
        rows.append(x / np.sqrt((x[:, ~odd] ** 2).mean((1, 2), keepdims=True)))
    errors = {}
    for name, size in GROUPS.items():
        found = [spectrum(part[~odd], part[odd]) for part in parts_of(rows, size)]
        variances, ms = np.concatenate([v for v, _ in found]), sum(ms for _, ms in found)
        for bits in all_bits:
            error = errors.setdefault(bits, error_at(variances, bits))
            yield name, bits, *rate(variances, error), error, ms


def main():
    parser = options_of(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--capture", type=pathlib.Path, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--rope", required=True, help="base,pairs or base,halves")
    parser.add_argument("--local", help="base,n: the base of all layers but every n-th")
    parser.add_argument("--bits", type=float, nargs="*", default=[3.0, 2.0])
    parser.add_argument("--csv", type=pathlib.Path)
    options = parser.parse_args()
    base, style = options.rope.split(",")
    local, period = map(float, (options.local or f"{base},1").split(","))
    found = {"k": {}, "v": {}}
    for name, rows in tensors(options.capture):
        layer, kind = name.removeprefix("layers.").split(".")
        if kind in found:
            found[kind][int(layer)] = rows.astype(np.float32)
    keys = [found["k"][i] for i in sorted(found["k"])]
    bases = [float(base) if (i + 1) % period == 0 else local for i in range(len(keys))]
    inputs = {
        "keys": keys,
        "plain keys": [rotated_back(x, options.context, at, style) for x, at in zip(keys, bases)],
        "values": [found["v"][i] for i in sorted(found["v"])],
    }
    lines = []
    for what, layers in inputs.items():
        for name, bits, needed, kept, error, ms in measure(layers, options.context, options.bits):
            line = dict(model=options.model, rows=what, head_bits=bits, transform=name)
            line |= dict(bits=f"{needed:.3f}", coefficients=f"{kept:.3f}")
            line |= dict(error=f"{error:.5f}", ms_per_token=f"{ms:.3f}")
            line |= dict(tokens=layers[0].shape[1], **context(sys.argv))
            lines.append(line)
            print(*line.values(), flush=True)
    if options.csv:
        new = not options.csv.exists()
        with open(options.csv, "a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(lines[0]), lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    main()
