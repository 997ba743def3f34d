#!/usr/bin/env python3
"""Sizes and times of saved states: a llama-server saves the slot of a prompt to a file and restores
it, with llama.cpp's own caches and with kvant's.

    saved_states.py KVANT SERVER MODEL TEXT [--tokens N] [--repeats N] [--json]

KVANT is the command, SERVER a llama-server whose ggml is a shared library, TEXT a file whose
beginning is the prompt. `save_ms` and `restore_ms` are the server's own times, and `_cpu_ms` is the
CPU time of all its threads, which says more on a machine that others use. `bytes` is the length of
the file. --cache-ram counts the same size without the tokens."""

import json
import os
import pathlib
import statistics
import tempfile

from llama_server import Server
from record import options_of

# name, options of kvant exec (None: llama.cpp's own cache), options of the server, KVANT_STATES
CACHES = [
    ("f16", None, [], ""),
    ("q8_0", None, ["-ctk", "q8_0", "-ctv", "q8_0"], ""),
    ("q4_0", None, ["-ctk", "q4_0", "-ctv", "q4_0"], ""),
    ("quality", ["--preset", "quality"], [], "auto"),
    ("balanced", ["--preset", "balanced"], [], "rows"),
    ("balanced", ["--preset", "balanced"], [], "auto"),
    ("small", ["--preset", "small"], [], "auto"),
]


def cpu_ms(server):
    tasks = pathlib.Path(f"/proc/{server.process.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e6


def action(server, what, repeats):
    """The server's last answer, and the medians of its times and of its CPU times."""
    times, cpu_times = [], []
    for _ in range(repeats):
        before = cpu_ms(server)
        status, answer = server.request("POST", f"/slots/0?action={what}", {"filename": "slot"})
        if status != 200:
            raise SystemExit(f"{what}: {answer}")
        times.append(answer["timings"][f"{what}_ms"])
        cpu_times.append(cpu_ms(server) - before)
    return answer, round(statistics.median(times), 1), round(statistics.median(cpu_times), 1)


def measure(cache, options, folder, log):
    name, kvant, flags, states = cache
    command = [options.server, "-m", options.model, "-c", str(options.tokens + 256), "-np", "1"]
    command += [*"-fa on -t 2 --slot-save-path".split(), f"{folder}/", "--cache-ram", "0", *flags]
    if kvant is not None:
        command = [options.kvant, "exec", *kvant, "--", *command]
    environment = dict(os.environ, **({"KVANT_STATES": states} if states else {}))
    text = pathlib.Path(options.text).read_text(encoding="utf-8", errors="replace")
    with Server(command, log, environment) as server:
        server.wait()
        _, answer = server.request("POST", "/tokenize", {"content": text[: 8 * options.tokens]})
        prompt = {"prompt": answer["tokens"][: options.tokens], "n_predict": 1}
        status, answer = server.request("POST", "/completion", prompt)
        if status != 200:
            raise SystemExit(f"{name}: {answer}")
        saved, save_ms, save_cpu_ms = action(server, "save", options.repeats)
        _, restore_ms, restore_cpu_ms = action(server, "restore", options.repeats)
    return {
        "cache": name,
        "states": states,
        "tokens": saved["n_saved"],
        "bytes": saved["n_written"],
        "save_ms": save_ms,
        "restore_ms": restore_ms,
        "save_cpu_ms": save_cpu_ms,
        "restore_cpu_ms": restore_cpu_ms,
    }


def main():
    parser = options_of(__doc__)
    for name in ("kvant", "server", "model", "text"):
        parser.add_argument(name)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "w") as log:
        rows = [measure(cache, options, folder, log) for cache in CACHES]
    print(json.dumps(rows) if options.json else "\n".join(map(str, rows)))


if __name__ == "__main__":
    main()
