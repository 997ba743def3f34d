"""Measures the speed of caches with each program's own benchmark: tokens per second of a prompt and
of decoding. The cache has 0 tokens, then DEPTH. The file knows the benchmarks' tables."""

import json
import re
import subprocess

from programs import folder, start, version
from record import append, context, model_name
from systems import HOSTS

DEPTH, PROMPT, TOKENS = 4096, 512, 32


class SpeedError(Exception):
    """A benchmark failed or printed something else."""


def bench(options, system, binary, model):
    """The words of llama-bench, which has depths in llama.cpp and in forks that are as new."""
    return [
        *start(system, binary / "llama-bench", options.kvant),
        *("-m", model, "-p", PROMPT, "-n", TOKENS, "-d", f"0,{DEPTH}", "-fa", 1),
        *("-t", options.threads, "-r", options.rounds, "-o", "json"),
    ]


def read_bench(text):
    """{depth: (prompt, decode)} in tokens per second."""
    found = {}
    tests, _ = json.JSONDecoder().raw_decode(text, text.index("[\n"))
    for test in tests:
        pair = found.setdefault(test["n_depth"], [0.0, 0.0])
        pair[test["n_gen"] > 0] = test["avg_ts"]
    return {depth: tuple(pair) for depth, pair in found.items()}


def sweep(options, system, binary, model):
    """The words of ik_llama.cpp's llama-sweep-bench, which measures at each multiple of a batch."""
    return [
        *start(system, binary / "llama-sweep-bench", options.kvant),
        *("-m", model, "-c", DEPTH + 2 * PROMPT, "-b", PROMPT, "-ub", PROMPT, "-fa", "on"),
        *("-t", options.threads, "-tb", options.threads),
    ]


def read_sweep(text):
    """Its table has the columns PP, TG, N_KV, T_PP, S_PP, T_TG and S_TG."""
    found = {}
    for row in re.findall(r"^\| *\d+ \|.*$", text, re.MULTILINE):
        cells = [float(cell) for cell in row.strip("| ").split("|")]
        if cells[2] in (0, DEPTH):
            found[int(cells[2])] = (cells[4], cells[6])
    return found


WAYS = {"ik_llama.cpp": (sweep, read_sweep)}


def measure(options, system, model):
    """Appends a line for each depth."""
    words, read = WAYS.get(system.program, (bench, read_bench))
    binary = folder(system.program, options.work, options.jobs)
    command = [str(word) for word in words(options, system, binary, model)]
    done = subprocess.run(command, cwd=options.work, capture_output=True)
    text = (done.stdout + done.stderr).decode("utf-8", "replace")
    try:
        found = read(text)
    except ValueError:
        found = {}
    if done.returncode != 0 or set(found) != {0, DEPTH}:
        raise SpeedError(f"{command[0]}: exit status {done.returncode}: {text[-500:]}")
    rows = []
    for depth, (prompt, decode) in sorted(found.items()):
        row = {
            "program": system.program,
            "version": version(HOSTS.get(system.program, system.program)),
            "cache": system.cache,
            "model": model_name(model),
            "depth": depth,
            "prefill_tps": f"{prompt:.2f}",
            "decode_tps": f"{decode:.2f}",
            **context(command),
        }
        rows.append({name: str(value) for name, value in row.items()})
        print(*row.values(), flush=True)
    append(options.speed_output, rows)
