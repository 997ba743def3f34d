#!/usr/bin/env python3
"""Writes sizes.csv: how much memory caches take, for the shapes of models, by cache and context.

    PYTHONPATH=integrations/python bench/sizes.py --commit $(git rev-parse --short HEAD) \\
        > bench/results/sizes.csv

The library computes presets: one sequence that fills the context, on a CPU, nothing calibrated.
pages_bytes has codes, scales and fp16 pages: the exact part and room for the rows of a step;
transforms_bytes has what a preset learns from the prompt. Their sum is what llama.cpp's users read
in the plug-in's first line. llama.cpp's own types are blocks of 32 numbers.
tests/python/test_sizes.py compares the file with the library.
"""

import argparse
import csv
import math
import sys

from kvant.library import PAGE_TOKENS
from kvant.rope import Rope
from kvant.scheme import Scheme
from kvant.tensor import Tensor


def blocks(tokens):
    return math.ceil(tokens / PAGE_TOKENS)


# Layers, kv heads, head_dim.
SHAPES = {
    "SmolLM2-135M": (30, 3, 64),
    "Llama 3.2 1B": (16, 8, 64),
    "Llama 3.1 8B": (32, 8, 128),
    "Qwen3 32B": (64, 8, 128),
    "Llama 3.3 70B": (80, 8, 128),
}
STOCK = {"f16": (32, 64), "q8_0": (32, 34), "q4_0": (32, 18)}  # numbers and bytes of a block
PRESETS = ("quality", "balanced", "small", "tiny")
CONTEXTS = [2**power for power in range(7, 18)]
# A figure draws this model. A new transform is due between 42 and 43 of 32 parts of an octave.
DRAWN = "Llama 3.1 8B"
PARTS = (32, 36, 40, 42, 43, 48, 56)
FINER = sorted(
    {blocks(n * part / 32) * PAGE_TOKENS for n in CONTEXTS[:-1] for part in PARTS} | {CONTEXTS[-1]}
)
COLUMNS = (
    "model,layers,kv_heads,head_dim,cache,context,pages_bytes,transforms_bytes,commit,command"
).split(",")


def tensor_bytes(codecs, exact, context):
    """Bytes of pages and of transforms of one layer's keys, or values."""
    n = blocks(context)
    tensor = Tensor(codecs, 1, n, n, exact=exact)
    # The positions alone decide how many transforms there may be, so any frequency serves.
    tensor.set_rope(Rope([0.0], n_positions=context))
    return tensor.info.bytes, tensor.info.learnt_most


def preset_bytes(preset, shape, context):
    """Bytes of pages and of transforms of a whole model's cache."""
    layers, kv_heads, head_dim = shape
    scheme = Scheme(preset, n_layers=layers, n_kv_heads=kv_heads, head_dim=head_dim)
    exact = scheme.exact(context)
    roles = [tensor_bytes(scheme.codecs(0, role), exact, context) for role in "kv"]
    return tuple(layers * sum(parts) for parts in zip(*roles))


def stock_bytes(cache, shape, context):
    layers, kv_heads, head_dim = shape
    block, block_bytes = STOCK[cache]
    return 2 * layers * context * (kv_heads * head_dim // block) * block_bytes, 0


def lines():
    for model, shape in SHAPES.items():
        for cache in (*STOCK, *PRESETS):
            of = stock_bytes if cache in STOCK else preset_bytes
            for context in FINER if model == DRAWN else CONTEXTS:
                yield [model, *shape, cache, context, *of(cache, shape, context)]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", required=True)
    commit = parser.parse_args().commit
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    for line in lines():
        writer.writerow([*line, commit, "bench/sizes.py"])


if __name__ == "__main__":
    main()
