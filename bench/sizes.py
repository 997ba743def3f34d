#!/usr/bin/env python3
"""Writes sizes.csv: the memory of caches for the shapes of models, by cache and context.

    bench/sizes.py --commit $(git rev-parse --short HEAD) > bench/results/sizes.csv

`kvant inspect` tells the sizes: one sequence that fills the context, on a CPU, nothing calibrated.
Each shape is a GGUF file without weights, as in bench/fit.py. The column pages_bytes has codes,
scales and fp16 pages, which are the exact part and room for the rows of a step. The column
transforms_bytes has the transforms that a preset learns from the prompt. The plug-in's first line
shows llama.cpp's users the sum of both. Contexts are multiples of 256, because llama.cpp has cells
in steps of 256."""

import csv
import os
import sys
import tempfile

import fit
from record import options_of

# Layers, kv heads, head_dim.
SHAPES = {
    "SmolLM2-135M": (30, 3, 64),
    "Llama 3.2 1B": (16, 8, 64),
    "Llama 3.1 8B": (32, 8, 128),
    "Qwen3 32B": (64, 8, 128),
    "Llama 3.3 70B": (80, 8, 128),
}
CACHES = ("f16", "q8_0", "q4_0", "quality", "balanced", "small", "tiny")
CONTEXTS = [2**power for power in range(8, 18)]
# A figure draws this model. A new transform is due between 42 and 43 of 32 parts of an octave.
DRAWN = "Llama 3.1 8B"
PARTS = (32, 36, 40, 42, 43, 48, 56)
STEP = 256
FINER = sorted(
    {-(-n * part // (32 * STEP)) * STEP for n in CONTEXTS[:-1] for part in PARTS} | {CONTEXTS[-1]}
)
COLUMNS = (
    "model,layers,kv_heads,head_dim,cache,context,pages_bytes,transforms_bytes,commit,command"
).split(",")


def write_model(path, shape):
    layers, kv_heads, head_dim = shape
    fit.write_model(
        path,
        {
            "model": "shape",
            "architecture": "llama",
            "layers": layers,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "window": 0,
        },
    )


def told(kvant, shape, contexts):
    """{(cache, context): (bytes of pages, bytes of transforms)}"""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "shape.gguf")
        write_model(path, shape)
        rows = fit.inspected(kvant, path, False, contexts)
    return {
        (row["preset"] or row["k"], row["ctx"]): (
            round(row["kv_bytes"] - row["transform_bytes"]),
            round(row["transform_bytes"]),
        )
        for row in rows
    }


def lines(kvant, models=tuple(SHAPES), finer=True):
    for model in models:
        contexts = FINER if model == DRAWN and finer else CONTEXTS
        sizes = told(kvant, SHAPES[model], contexts)
        for cache in CACHES:
            for context in contexts:
                yield [model, *SHAPES[model], cache, context, *sizes[cache, context]]


def main():
    parser = options_of(__doc__)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--kvant", default=fit.BENCH.parent / "build" / "bin" / "kvant")
    options = parser.parse_args()
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    for line in lines(options.kvant):
        writer.writerow([*line, options.commit, "bench/sizes.py"])


if __name__ == "__main__":
    main()
