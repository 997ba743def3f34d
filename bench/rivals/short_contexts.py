#!/usr/bin/env python3
"""Measures smaller exact parts and smaller matrices in short contexts, where these take more memory
than in long ones. short_contexts.patch makes a build that reads such settings from variables.

    mkdir TRY && git archive HEAD | tar -x -C TRY
    patch -d TRY -p1 < bench/rivals/short_contexts.patch && make -C TRY
    python3 bench/rivals/short_contexts.py --kvant TRY/build/bin/kvant -m model.gguf \\
        -f wiki.test.raw

Lines go to bench/results/rivals_short.csv. `bits` counts everything: codes, exact pages, and the
most matrices that a context of this length can need. With the patch W is rounded to 4 bits, not
stored in 4 bits, but counted so: 4 bits below the diagonal, and an fp16 step and an fp16 diagonal
for each row."""

import argparse
import json
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from quality import model_name  # noqa: E402
from record import append, context  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
FEW = {"KVX_WBITS": "4"}
# One page of 64 tokens for each tensor, which the first block takes. Layers share the other pages.
FIRST_ONLY = {"KVX_LEAST": "64", "KVX_SHARE": "64", "KVX_PLUS": "0"}
MIXED = {"KVX_K": "trellis-3:transform=first", "KVX_V": "trellis-2"}
# Two pages: the first block, and the newest 64 tokens as far as they lie in one block.
BOTH_ENDS = {"KVX_LEAST": "128", "KVX_SHARE": "128", "KVX_OWN": "128", "KVX_PLUS": "0"}
# name: preset, variables
SETTINGS = {
    "small": ("small", {}),
    "small, both ends, W in 4 bits": ("small", BOTH_ENDS | FEW),
    "small, first block": ("small", FIRST_ONLY),
    "small, first block, W in 4 bits": ("small", FIRST_ONLY | FEW),
    "small, values in 2 bits, first block, W in 4 bits": ("small", FIRST_ONLY | FEW | MIXED),
    "tiny, first block, W in 4 bits": ("tiny", FIRST_ONLY | FEW),
}


def call(options, command, preset, variables, *words):
    words = [options.kvant, command, "-m", options.model, "-c", options.length, *words]
    words = [str(word) for word in (*words, "--preset", preset, "--json")]
    run = subprocess.run(words, env=os.environ | variables, capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"short_contexts: {run.stderr[-500:]}")
    return words, json.loads(run.stdout)[-1]


def line(options, name):
    preset, variables = SETTINGS[name]
    _, full = call(options, "inspect", preset, variables)
    words, found = call(
        options,
        *("eval", preset, variables),
        *("-f", options.text, "--chunks", 1, "-b", options.batch, "-t", options.threads),
        *(["--base-cache", options.base] if options.base else []),
    )
    return {
        "model": model_name(options.model),
        "setting": name,
        "length": options.length,
        "batch": options.batch,
        "bits": f"{full['cache_bits']:.2f}",
        **{key: f"{found[key]:.6g}" for key in ("kld_mean", "kld_se", "kld_p99", "top1")},
        **context([*(f"{k}={v}" for k, v in variables.items()), *words]),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", type=pathlib.Path, required=True)
    parser.add_argument("-f", "--text", type=pathlib.Path, required=True)
    parser.add_argument("--kvant", type=pathlib.Path, required=True, help="of the patched build")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--base", type=pathlib.Path, help="folder for the f16 runs (kvant eval)")
    parser.add_argument("--settings", default=";".join(SETTINGS))
    parser.add_argument(
        "-o", "--output", type=pathlib.Path, default=ROOT / "bench/results/rivals_short.csv"
    )
    options = parser.parse_args()
    for name in options.settings.split(";"):
        made = line(options, name)
        append(options.output, [{key: str(value) for key, value in made.items()}])
        print(*list(made.values())[:9], flush=True)


if __name__ == "__main__":
    main()
