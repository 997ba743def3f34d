#!/usr/bin/env python3
"""Shows kvant in 3 minutes: memory, quality and speed of its presets next to llama.cpp's own KV
caches, and the same question to three caches.

Quality is measured with Qwen2.5-Coder-0.5B, whose q4_0 cache is broken. Speed is measured with
SmolLM2-135M, whose cache is large compared with its weights. `kvant eval`, `kvant bench model` and
`kvant run` measure; --json prints their numbers as one array."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import textwrap
import time

import fetch

WIDTH = 78
CACHES = ["f16", "q8_0", "q4_0", "quality", "balanced", "small"]
STOCK = CACHES[:3]
ASKED = ["f16", "q4_0", "balanced"]
# These sizes fit into the 3 minutes.
TOKENS, DEPTH, DECODE, ROUNDS = 1024, 1536, 16, 4
SHOWN_AT = 32768  # the context, in tokens, whose memory is shown
# If rounds differ by more than this share, they show what else the machine does, and not the speed
# of a cache.
AGREE = 0.25

# The text that the answer needs is in the middle of the prompt, so the answer depends on the cache.
FACT = (
    "Remember this: the ship that carried the first printed copy of this manual was called "
    "the Golden Heron."
)
QUESTION = "What was the name of the ship that carried the first printed copy of this manual?"
PROMPT_CHARACTERS = 2600  # about 700 tokens

GREEN, RED, BOLD = "32", "31", "1"


class Failed(Exception):
    """A command failed and has printed why. The argument is its exit code."""


def say(text):
    print(text, file=sys.stderr, flush=True)


def coloured():
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def paint(text, colour):
    return f"\033[{colour}m{text}\033[0m" if coloured() and colour else text


def options_of(cache):
    return ["--stock", cache] if cache in STOCK else ["--preset", cache]


def kvant(options, *words, text=None):
    """Runs a command and returns its output. The command shows its progress on a terminal;
    elsewhere it would print lines of JSON. It gets a separate session, so that Ctrl-C reaches only
    this process, and a killed command prints nothing."""
    words = [options.kvant, *map(str, words)]
    messages = None if sys.stderr.isatty() else subprocess.PIPE
    with subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=messages,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as child:
        try:
            out, said = child.communicate(text or "")
        except KeyboardInterrupt:
            child.kill()
            child.wait()
            raise
    if child.returncode != 0:
        say(
            "".join(
                line for line in (said or "").splitlines(True) if not line.startswith("{")
            ).rstrip()
        )
        raise Failed(child.returncode)
    return out


def measure(options, model, fast_model, text):
    """One dictionary per cache: the results of eval with the speeds of bench model."""
    configs = [word for cache in CACHES[1:] for word in options_of(cache)]
    say(f"quality of {pathlib.Path(model).stem}: {TOKENS} tokens through {len(CACHES)} caches")
    quality = json.loads(
        kvant(
            options,
            "eval",
            "-m",
            model,
            "-f",
            text,
            "-c",
            TOKENS,
            "--chunks",
            1,
            "--json",
            *configs,
        )
    )
    say(f"speed of {pathlib.Path(fast_model).stem} with {DEPTH} tokens in each cache")
    speed = json.loads(
        kvant(
            options,
            "bench",
            "model",
            "-m",
            fast_model,
            "-d",
            DEPTH,
            "-p",
            0,
            "-n",
            DECODE,
            "-r",
            ROUNDS,
            "--json",
            *options_of("f16"),
            *configs,
        )
    )
    if len(quality) != len(CACHES) or len(speed) != len(CACHES):
        say("demo: a measurement is incomplete")
        raise Failed(1)
    keys = ("decode_tps", "decode_low", "decode_high")
    return [
        {
            **row,
            "name": cache,
            "fits": memory(row, quality[0], SHOWN_AT),
            **{key: fast[key] for key in keys},
        }
        for cache, row, fast in zip(CACHES, quality, speed)
    ]


def memory(row, f16, tokens):
    """Bytes of a cache with this number of tokens: one part grows by the codec's true bits, the
    rest stays."""
    grows = row["bits"] / 16 * f16["kv_bytes"]
    return grows * tokens / TOKENS + (row["kv_bytes"] - grows)


def rounds_agree(rows):
    return all(row["decode_high"] - row["decode_low"] <= AGREE * row["decode_tps"] for row in rows)


def colour_of(kld):
    return GREEN if kld < 0.01 else "" if kld < 0.1 else RED


def table(rows):
    speeds = rounds_agree(rows)
    print(
        paint(
            f"{'KV cache':<19}{'MiB':>7}  {'of f16':>6}  {'KLD':>7}  {'same token':>10}"
            + (f"  {'tokens/s':>8}  rounds" if speeds else ""),
            BOLD,
        )
    )
    for row in rows:
        name = f"{row['name']} (default)" if row["name"] == "balanced" else row["name"]
        kld = "0" if row["name"] == "f16" else f"{row['kld_mean']:.4f}"
        line = f"{name:<19}{row['fits'] / 2**20:>7.1f}  {row['fits'] / rows[0]['fits']:>6.2f}  "
        line += paint(f"{kld:>7}", colour_of(row["kld_mean"])) + f"  {100 * row['top1']:>8.1f} %"
        if speeds:
            line += (
                f"  {row['decode_tps']:>8.1f}  {row['decode_low']:.0f} to {row['decode_high']:.0f}"
            )
        print(line)
    return speeds


def paragraph(text):
    print(textwrap.fill(text, WIDTH))


def explain(rows, model, fast_model, speeds):
    by_name = {row["name"]: row for row in rows}
    print()
    paragraph(
        "KLD: how far the probabilities of the next token move from the f16 cache's. "
        "Below 0.01 a difference is hard to see, above 0.1 answers change."
    )
    paragraph(
        f"MiB: {pathlib.Path(model).stem} with {SHOWN_AT} tokens. "
        "The presets learned from the prompt, without a calibration."
    )
    if speeds:
        paragraph(
            f"tokens/s: {pathlib.Path(fast_model).stem} after {DEPTH} tokens, "
            f"median and range of {ROUNDS} rounds."
        )
    else:
        paragraph(
            f"No speed: {ROUNDS} rounds of one cache differ by more than {100 * AGREE:.0f} %, "
            "so this machine is busy with something else."
        )
    small, q4 = by_name["balanced"], by_name["q4_0"]
    if small["kld_mean"] < q4["kld_mean"]:
        times = q4["kld_mean"] / small["kld_mean"]
        paragraph(
            paint(
                f"balanced: {small['fits'] / by_name['f16']['fits']:.2f} of f16's memory, "
                f"1/{times:.0f} of q4_0's divergence, {small['fits'] / q4['fits']:.2f} of its "
                "size.",
                BOLD,
            )
        )


def prompt_of(text):
    body = pathlib.Path(text).read_text(encoding="utf-8")
    start = body.find("\n\n", len(body) // 2)
    excerpt = body[start : start + PROMPT_CHARACTERS]
    middle = excerpt.find("\n\n", len(excerpt) // 2)
    return f"{excerpt[:middle]}\n\n{FACT}\n{excerpt[middle:]}\n\n"


def ask(options, model, text):
    prompt = prompt_of(text)
    print()
    paragraph(
        f"The same question to three caches, after a text of {len(prompt)} characters "
        "with this in its middle:"
    )
    print(textwrap.fill(FACT, WIDTH, initial_indent="  ", subsequent_indent="  "))
    print(
        textwrap.fill(QUESTION, WIDTH, initial_indent="  ", subsequent_indent="  ") + "\n",
        flush=True,
    )
    for cache in ASKED:
        out = kvant(
            options,
            "run",
            "-m",
            model,
            *options_of(cache),
            "-n",
            32,
            "-f",
            "-",
            "-p",
            QUESTION,
            text=prompt,
        )
        answer = (
            " ".join("".join(c if c.isprintable() else " " for c in out).split()) or "(nothing)"
        )
        right = "Golden Heron" in answer
        print(
            paint(f"{cache:<10}", GREEN if right else RED)
            + textwrap.fill(answer, WIDTH - 10, subsequent_indent=" " * 10),
            flush=True,
        )


def run(options):
    if not os.environ.get("KVANT_RUNTIME"):
        os.environ["KVANT_RUNTIME"] = str(fetch.fetch_runtime())
    model = options.model or str(fetch.fetch_model("qwen"))
    fast_model = options.model or str(fetch.fetch_model("smollm2"))
    text = options.text or str(fetch.fetch_text())
    started = time.monotonic()
    rows = measure(options, model, fast_model, text)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print()
    explain(rows, model, fast_model, table(rows))
    ask(options, model, text)
    say(f"\nThat took {time.monotonic() - started:.0f} s.")
    print(
        "\nYour own model, in your own llama.cpp:\n"
        + paint(f"  {options.kvant} exec -- llama-server -m model.gguf", BOLD)
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kvant", default="build/bin/kvant", help="the command (default %(default)s)"
    )
    parser.add_argument(
        "--model", help="a .gguf file for everything (default: the two models, fetched)"
    )
    parser.add_argument("--text", help="a text (default: the topics of Python's help())")
    parser.add_argument("--json", action="store_true", help="the numbers as JSON, and no answers")
    options = parser.parse_args()
    try:
        run(options)
    except fetch.FetchError as error:
        say(f"demo: {error}" + (f"\n  hint: {error.hint}" if error.hint else ""))
        return 1
    except Failed as error:
        return error.args[0]
    except FileNotFoundError as error:
        say(f"demo: {error.filename}: no such file\n  hint: `make` builds the command")
        return 1
    except KeyboardInterrupt:
        say(("\r\033[K" if sys.stderr.isatty() else "") + "demo: stopped; what was fetched stays")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
