#!/usr/bin/env python3
"""Runs tiny models of llama.cpp's architectures (arch_probe.cpp) on kvant's cache and on the CPU's.

    test_archs.py            about twenty models, one for each kind of cache
    test_archs.py --all CSV  all models; writes the table, a line per architecture

An error is the root mean square of the difference of logits, relative to the logits of the f16
cache. The errors of llama.cpp's own q8_0 and q4_0 limit it. Environment: ARCH_PROBE,
KVANT_PLUGIN_FILE.
"""

import array
import csv
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile

PROBE = os.environ["ARCH_PROBE"]
PLUGIN = os.environ["KVANT_PLUGIN_FILE"]

# One model for each kind of cache: plain, MQA, windows, a softcap, shared, sinks, chunks, state
# alone, MLA, MLA with an indexer, an indexer, no flash attention, no cache. Also hybrids: gated
# delta net, short convolution, Mamba in the same layers and in others.
DOZEN = """
    llama:dense qwen3:dense gemma3:dense gemma2:dense gemma3n:dense gemma4:dense gpt-oss:moe
    llama4:moe qwen35:dense qwen3next:moe lfm2:dense falcon-h1:dense granitehybrid:dense
    nemotron_h:dense mamba:dense deepseek2:moe deepseek32:moe kimi-linear:moe deepseek4:moe
    minimax-m3:moe
    t5:dense grok:moe eurobert:dense
""".split()

# The step of int-8 is proportional to the range of 128 numbers, which is 5.3 standard deviations of
# normal numbers. The step of q8_0 is proportional to twice the largest of 32 numbers: 4.7. So int-8
# may have 1.13 times the error. A tiny model has few rows, so a quarter more is left to chance.
INT8_BOUND = 1.4
# balanced has at least 4.125 bits per number and q4_0 has 4.5. Errors double with each bit less.
BALANCED_BOUND = 2 ** (4.5 - 4.125)
# If llama.cpp does not fuse operations next to kvant's (DeepSeek 4), results differ by the rounding
# of fp16, whose 11 bits are 3 more than q8_0's. Otherwise they are equal.
PLAIN_BOUND = 2**-3
# The difference that fp32's rounding makes if the cache has no influence on the logits.
ROUNDING = 1e-6

KVANT = {"GGML_BACKEND_PATH": PLUGIN}
CACHES = {
    "f16": ("-", "f16", {}),
    "q8_0": ("-", "q8_0", {}),
    "q4_0": ("-", "q4_0", {}),
    "int-8": ("KVANT", "f16", {**KVANT, "KVANT_K": "int-8", "KVANT_V": "int-8"}),
    "balanced": ("KVANT", "f16", KVANT),
}
STATUS = {
    2: "no device",
    3: "no model",
    4: "no context",
    5: "decoding failed",
    6: "state not restored",
}


class Run:
    """One run of the probe: its output and its logits."""

    def __init__(self, arch, cache, folder):
        device, kind, settings = CACHES[cache]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("KVANT_", "GGML_"))}
        clean.update(settings, GGML_NO_BACKTRACE="1")
        out = pathlib.Path(folder) / cache
        out.unlink(missing_ok=True)
        done = subprocess.run(
            [PROBE, *arch.split(":"), device, kind, out],
            env=clean,
            capture_output=True,
            errors="replace",
            timeout=300,
        )
        self.status = done.returncode
        self.failure = STATUS.get(self.status, f"status {self.status}")
        self.words = done.stdout.split("\n")[0]
        self.said = [at[7:] for at in done.stderr.splitlines() if at.startswith("kvant: ")]
        self.logits = array.array("f")
        if self.status == 0:
            self.logits.frombytes(out.read_bytes())

    def error(self, reference):
        """Returns None if one of the two runs failed, or has a NaN that the second run lacks."""
        if self.status != 0 or len(self.logits) != len(reference.logits) or len(self.logits) == 0:
            return None
        square = sum((a - b) ** 2 for a, b in zip(self.logits, reference.logits))
        whole = sum(b * b for b in reference.logits)
        error = math.sqrt(square / whole) if whole != 0 else float(square != 0)
        return None if math.isnan(error) else error

    def layers(self):
        """The numbers of compressed layers and of all layers, from the line at the start."""
        for line in self.said:
            found = re.search(r"(\d+) of (\d+) layers", line)
            if found:
                return int(found[1]), int(found[2])
        return 0, 0


def kind_of(run):
    text = " ".join(run.said)
    if run.words == "no memory":
        return "none"
    compressed, state = run.layers()[0] > 0, "recurrent state" in text
    names = {
        "latents": "MLA: latents" in text,
        "keys and values": compressed and "MLA: latents" not in text,
        "recurrent state": state,
        "keys alone": "keys without values" in text,
    }
    return " + ".join(name for name, has in names.items() if has)


def measure(arch, folder):
    """A line of the table. Its last field names the fault."""
    runs = {"f16": Run(arch, "f16", folder)}
    row = dict(zip(("architecture", "model"), arch.split(":")))
    if runs["f16"].status != 0:
        return {**row, "outcome": "llama.cpp's test makes no such model"}
    for cache in list(CACHES)[1:]:
        runs[cache] = Run(arch, cache, folder)
    errors = {cache: run.error(runs["f16"]) for cache, run in runs.items() if cache != "f16"}
    compressed, layers = runs["int-8"].layers()
    row.update({"cache": kind_of(runs["int-8"]), "compressed": compressed, "layers": layers})
    row.update({cache: "" if error is None else f"{error:.3g}" for cache, error in errors.items()})
    for ours, stock in (("int-8", "q8_0"), ("balanced", "q4_0")):
        if compressed and errors[ours] and errors[stock] and errors[stock] > ROUNDING:
            row[f"{ours}/{stock}"] = f"{errors[ours] / errors[stock]:.2f}"
    row["outcome"] = outcome(runs, errors, compressed)
    return row


def outcome(runs, errors, compressed):
    for cache in ("int-8", "balanced"):
        run = runs[cache]
        if run.status == 4 and len(run.said) == 1:
            return "refused: " + run.said[0]
        if run.words == "no memory" and run.said:
            return f"WRONG: {run.said[0]}"
        if errors[cache] is None:
            return f"WRONG: {cache}: {run.failure or 'NaN'}"
    bounds = {"int-8": ("q8_0", INT8_BOUND), "balanced": ("q4_0", BALANCED_BOUND)}
    for ours, (stock, factor) in bounds.items():
        limit = errors[stock] if compressed else errors["q8_0"]
        factor = factor if compressed else PLAIN_BOUND
        if limit is not None and errors[ours] > factor * limit + ROUNDING:
            return f"WRONG: {ours}: error {errors[ours]:.3g}, {stock}: {limit:.3g}"
    copies = any("decoded copy" in line for line in runs["int-8"].said)
    if compressed:
        return "right, on decoded copies" if copies else "right"
    return "right, not compressed" if runs["int-8"].words != "no memory" else "right, has no cache"


FIELDS = """
    architecture model cache compressed layers
    q8_0 int-8 int-8/q8_0 q4_0 balanced balanced/q4_0 outcome
""".split()


def main():
    whole = sys.argv[1:2] == ["--all"]
    archs = DOZEN
    if whole:
        listed = subprocess.run([PROBE, "list"], capture_output=True, text=True, check=True).stdout
        archs = [line.replace(" ", ":") for line in listed.splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for arch in archs:
            rows.append(measure(arch, folder))
            print(arch, rows[-1].get("cache", ""), rows[-1]["outcome"], sep=" | ", flush=True)
    if whole:
        with open(sys.argv[2], "w", newline="") as file:
            table = csv.DictWriter(file, FIELDS, lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
    bad = ("WRONG",) if whole else ("WRONG", "llama.cpp's test makes no such model")
    wrong = [row for row in rows if row["outcome"].startswith(bad)]
    refused = {row["architecture"] for row in rows if row["outcome"].startswith("refused")}
    print(f"{len(rows)} models, {len(wrong)} wrong, refused: {' '.join(sorted(refused)) or 'none'}")
    return 1 if wrong or refused - {"grok"} else 0


if __name__ == "__main__":
    sys.exit(main())
