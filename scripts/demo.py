#!/usr/bin/env python3
"""The main job, shown: a small model in a stock llama.cpp, with stock and with kvant's KV caches.

Prints one table (size, quality, speed) and an answer that the model generates from a long prompt on the
compressed cache. Under 3 minutes on 2 cores once everything is fetched. Quality is measured by `kvant eval`,
speed by `kvant bench model`; --json hands on their numbers as one array.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

import fetch

STOCK = ["q8_0", "q4_0"]
KVANT = [("int-4:axis=channel,group=64", "turboquant-4"), ("int-3:axis=channel", "turboquant-3")]  # K, V
# Sizes that fit the 3 minutes.
CONTEXT, CHUNKS = 1024, 1
DEPTH, PREFILL, DECODE, ROUNDS = 1024, 128, 16, 2
# What the answer needs stands in the middle of the prompt, so it has to come through the compressed cache.
FACT = (
    "Remember this: the ship that carried the first printed copy of this manual was called the Golden Heron."
)
QUESTION = "What was the name of the ship that carried the first printed copy of this manual?"
PROMPT_CHARACTERS = 6000  # about 1500 tokens

COLUMNS = [
    ("cache", "cache", "{}"),
    ("bits", "bits", "{:.2f}"),
    ("kv_mib", "KV MiB", "{:.2f}"),
    ("ppl", "ppl", "{:.2f}"),
    ("kld_mean", "mean KLD", "{:.4f}"),
    ("top1", "top-1 %", "{:.1f}"),
    ("prefill_tps", "prefill t/s", "{:.0f}"),
    ("decode_tps", "decode t/s", "{:.1f}"),
]


def say(text):
    print(text, file=sys.stderr, flush=True)


def configurations():
    options = [word for name in STOCK for word in ("--stock", name)]
    return options + [word for k, v in KVANT for word in ("-k", k, "-v", v)]


def kvant(command, arguments):
    done = subprocess.run([str(word) for word in [*command, *arguments]], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return done.stdout


def measure(command, model, text):
    say(f"quality: {CHUNKS} x {CONTEXT} tokens against the f16 cache ...")
    quality = json.loads(
        kvant(
            [command, "eval"],
            ["-m", model, "-f", text, "-c", CONTEXT, "--chunks", CHUNKS, *configurations(), "--json"],
        )
    )
    say(f"speed at {DEPTH} tokens of context ...")
    speed = json.loads(
        kvant(
            [command, "bench", "model"],
            [
                "-m",
                model,
                "-d",
                DEPTH,
                "-p",
                PREFILL,
                "-n",
                DECODE,
                "-r",
                ROUNDS,
                "--stock",
                "f16",
                *configurations(),
                "--json",
            ],
        )
    )
    by_name = {(row["cache"], row["k"], row["v"]): row for row in speed}
    return [{**by_name[(row["cache"], row["k"], row["v"])], **row} for row in quality]


def table(rows):
    cells = [[heading for _, heading, _ in COLUMNS]]
    for row in rows:
        name = row["k"] if row["k"] == row["v"] else f"{row['k']} / {row['v']}"
        shown = dict(
            row, cache=f"{row['cache']} {name}", kv_mib=row["kv_bytes"] / 2**20, top1=100 * row["top1"]
        )
        cells.append([form.format(shown[key]) for key, _, form in COLUMNS])
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    for line in cells:
        print(
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))
            ).rstrip()
        )


def long_prompt(text):
    body = pathlib.Path(text).read_text(encoding="utf-8")
    start = body.find("\n\n", len(body) // 2)
    excerpt = body[start : start + PROMPT_CHARACTERS]
    middle = excerpt.find("\n\n", len(excerpt) // 2)
    return f"{excerpt[:middle]}\n\n{FACT}\n{excerpt[middle:]}\n\n"


def answer(command, model, text):
    prompt = long_prompt(text)
    k, v = KVANT[0]
    print(f"\nOn the {k} / {v} cache. In the middle of a prompt of {len(prompt)} characters:")
    print(f"  {FACT}\nAt its end:\n  {QUESTION}\nAnswer:", flush=True)
    arguments = ["-m", model, "-k", k, "-v", v, "-n", "40", "-f", "-", "-p", QUESTION]
    return subprocess.run([command, "run", *arguments], input=prompt, text=True).returncode


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kvant", default="build/bin/kvant", help="the command (default %(default)s)")
    parser.add_argument("--model", help="a .gguf file (default: SmolLM2-135M-Instruct, fetched)")
    parser.add_argument("--text", help="a text (default: the topics of Python's help())")
    parser.add_argument("--json", action="store_true", help="the table's numbers as JSON, and no answer")
    options = parser.parse_args()
    started = time.monotonic()
    try:
        os.environ.setdefault("KVANT_RUNTIME", str(fetch.fetch_runtime()))
        model = options.model or str(fetch.fetch_model("smollm2"))
        text = options.text or str(fetch.fetch_text())
    except fetch.FetchError as error:
        say(f"demo: {error}" + (f"\n  hint: {error.hint}" if error.hint else ""))
        return 1
    fetched = time.monotonic()
    rows = measure(options.kvant, model, text)
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    print(f"\n{pathlib.Path(model).name}, {CHUNKS} x {CONTEXT} tokens of {pathlib.Path(text).name};")
    print(f"speed after {DEPTH} tokens of context\n")
    table(rows)
    code = answer(options.kvant, model, text)
    say(f"\n{time.monotonic() - fetched:.0f} s, after {fetched - started:.0f} s of fetching")
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
