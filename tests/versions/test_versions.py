"""Runs kvant on stock builds of llama.cpp, old and new. The plug-in compares their tables, and a
completion runs. The KL divergence to a build's own f16 cache must equal the pinned build's. A
Python binding of each build runs under kvant exec: its cache is compressed, or one line says why
not.

    test_versions.py KVANT PLUGIN MODEL [--csv FILE] [--only NAME]...

Writes a line for each build to FILE (bench/results/versions.csv). Ends with 1 if a build behaves
unexpectedly. The wheels and Debian's libraries need a newer C library than many machines have. They
run with Debian's, which is unpacked and not installed.
"""

import argparse
import csv
import json
import math
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import fetch  # noqa: E402
import fetch_pins  # noqa: E402

PINNED = "npm-" + fetch_pins.NPM_VERSION
DEBIAN = "debian-" + fetch.DEBIAN
# ggml 0.9 has no flag for nodes that must be computed, or other tables of buffers.
REFUSED = {"npm-3.14.5": "flag of a node to be computed", "npm-3.18.1": "buffer: functions"}
FIELDS = ["build", "ggml", "api", "outcome", "why", "kld_int8", "kld_balanced", "text"]
REFUSAL = r"kvant: ggml (\S+) has another layout than this plug-in knows: ([^;]+)"
PROMPT = "The capital of France is"
BINDING = ROOT / "tests" / "cli" / "binding.py"
COMPRESSED, TRANSPOSED = "30 of 30 layers", "flash attention is off"
LINKED = "back ends are linked into the program's libraries"


def folder_of(name):
    if name == PINNED:
        return fetch.fetch_runtime()
    return fetch.fetch_debian() / "llama" if name == DEBIAN else fetch.fetch_build(name)


class Build:
    def __init__(self, name, options):
        self.name, self.folder, self.options = name, folder_of(name), options
        self.before = []
        if not name.startswith("npm-"):
            system = fetch.fetch_debian()
            folders = f"{self.folder}:{system}"
            self.before = [system / "ld-linux-x86-64.so.2", "--library-path", folders]

    def kvant(self, *arguments):
        command = [*self.before, self.options.kvant, *arguments]
        command += ["-m", self.options.model, "--runtime", self.folder]
        environment = dict(os.environ, KVANT_PLUGIN=self.options.plugin, KVANT_VERBOSE="1")
        return subprocess.run(
            [str(word) for word in command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=1800,
        )

    def binding(self, flags):
        """Returns the status, and kvant's lines without the line about flags."""
        python = [*self.before, sys.executable, "-B", BINDING, self.folder, self.options.model]
        command = [self.options.kvant, "exec", "--", *python, *flags]
        done = subprocess.run(
            [str(word) for word in command],
            env=dict(os.environ, KVANT_PLUGIN=self.options.plugin),
            capture_output=True,
            text=True,
            timeout=600,
        )
        lines = [line for line in done.stderr.splitlines() if line.startswith("kvant: ")]
        lines = [line for line in lines if "does not begin with llama" not in line]
        return ("Paris" if "Paris" in done.stdout else done.returncode), lines

    def row(self):
        done = self.kvant("run", "-p", PROMPT, "-n", "12", "--preset", "balanced")
        row = dict.fromkeys(FIELDS, "")
        row["build"] = self.name
        lines = [line for line in done.stderr.splitlines() if line.startswith("kvant: ")]
        found = re.search(r"^kvant: ggml (\S+), back-end API (\d)", done.stderr, re.M)
        if found:
            row["ggml"], row["api"] = found.groups()
        if done.returncode != 0:
            refusal = re.search(REFUSAL, done.stderr)
            row["outcome"] = f"fails ({done.returncode})"
            row["why"] = (lines or [done.stderr[-200:]])[0]
            if refusal:
                row["outcome"], row["ggml"], row["why"] = "refused", *refusal.groups()
            return row, None
        row["text"] = done.stdout.strip()
        text = ["-f", "kvant:manual", "-c", "320", "--from", "256", "--chunks", "1"]
        done = self.kvant("eval", *text, "-k", "int-8", "--preset", "balanced", "--json")
        if done.returncode != 0:
            row["outcome"], row["why"] = f"fails ({done.returncode})", done.stderr[-200:]
            return row, None
        quality = json.loads(done.stdout)
        row["outcome"] = "runs"
        row["kld_int8"], row["kld_balanced"] = (f"{quality[i]['kld_mean']:.5f}" for i in (1, 2))
        return row, quality


def differs(quality, pinned):
    """The cache is the same, but the kernels of matrices are not. Each mean over the same tokens
    has a standard error. The means may differ by four standard errors of the difference.
    """
    for here, there in zip(quality[1:], pinned[1:]):
        apart = abs(here["kld_mean"] - there["kld_mean"])
        if apart > 4 * math.hypot(here["kld_se"], there["kld_se"]):
            return f"KL divergence {here['kld_mean']:.5f}, with {PINNED} {there['kld_mean']:.5f}"
    return None


def fault(row, quality, pinned):
    expected = REFUSED.get(row["build"])
    if expected is not None:
        named = row["outcome"] == "refused" and row["why"].startswith(expected)
        return None if named else f"is not refused for {expected}"
    if row["outcome"] != "runs":
        return row["why"]
    return differs(quality, pinned) or (None if "Paris" in row["text"] else f"says {row['text']!r}")


def binding_fault(build):
    """The program continues without kvant in a build that the plug-in refuses."""
    refusal = REFUSED.get(build.name)
    cases = [
        (["--load"], "Paris", refusal or COMPRESSED),
        (["--load", "--flash-attn", "off"], "Paris" if refusal else 3, refusal or TRANSPOSED),
    ]
    if build.name.startswith("py-sync-"):
        cases.append(([], "Paris", LINKED))
    for flags, outcome, text in cases:
        given, lines = build.binding(flags)
        if given != outcome or len(lines) != 1 or text not in lines[0]:
            return f"binding {flags}: {given} {lines}"
    return None


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("kvant", "plugin", "model"):
        parser.add_argument(name)
    parser.add_argument("--csv")
    parser.add_argument("--only", action="append", choices=[PINNED, *fetch.BUILDS, DEBIAN])
    options = parser.parse_args()
    names = [PINNED] + [name for name in options.only or [*fetch.BUILDS, DEBIAN] if name != PINNED]
    rows, faults, pinned = [], 0, None
    for name in names:
        build = Build(name, options)
        row, quality = build.row()
        pinned = pinned or quality
        if pinned is None:
            sys.exit(f"{name}: {row['why']}")
        wrong = fault(row, quality, pinned) or binding_fault(build)
        faults += wrong is not None
        rows.append(row)
        shown = [row[field] for field in ("ggml", "outcome", "why", "kld_int8", "kld_balanced")]
        print(f"{name}:", *shown, f" WRONG: {wrong}" if wrong else "", flush=True)
    if options.csv:
        rows.sort(key=lambda row: ([int(n) for n in row["ggml"].split(".") if n], row["build"]))
        with open(options.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return faults != 0


if __name__ == "__main__":
    sys.exit(main())
