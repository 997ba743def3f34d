#!/usr/bin/env python3
"""Decoding with more threads than cores, or next to other work: llama.cpp's f16 cache and kvant.

    cc -O2 -I HEADERS/include -I HEADERS/ggml/include bench/threads/decode.c -o decode \\
        LIBRARIES/libllama*.so LIBRARIES/libggml*.so -Wl,-rpath,LIBRARIES
    bench/record.py bench/results/threads.csv -- bench/threads/threads.py decode LIBRARIES PLUGIN \\
        MODEL --build OpenMP --place core --threads 1,2,4,8 --json

The places are `core`, one core (taskset -c 0), and `all`, all cores. `neighbour` is all cores next
to a busy thread for each. `quota` is all cores with the CPU time of --quota (a control group, which
only root may make). The caches alternate. tokens_per_s and cpu_ms (CPU time of a token, of all
threads) are medians of the rounds. On one core cpu_ms shows the cost of waiting threads even if
other programs use the machine. `load`: how many threads wanted to run."""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

GROUP = pathlib.Path("/sys/fs/cgroup/cpu/kvant_bench_threads")


def make_group(cpus):
    GROUP.mkdir(exist_ok=True)
    (GROUP / "cpu.cfs_quota_us").write_text(str(int(cpus * 100000)))


def enter_group():
    (GROUP / "cgroup.procs").write_text(str(os.getpid()))


def start_neighbours():
    busy = [sys.executable, "-c", "while True: pass"]
    return [subprocess.Popen(busy) for _ in os.sched_getaffinity(0)]


def decode(arguments, plugin, n_threads):
    """Tokens per second and CPU milliseconds per token of one process."""
    prefix = ["taskset", "-c", "0"] if arguments.place == "core" else []
    command = [
        *prefix,
        arguments.decode,
        arguments.libraries,
        plugin,
        arguments.model,
        str(n_threads),
        str(arguments.seconds),
    ]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"KVANT_QUIET": "1"},
        preexec_fn=enter_group if arguments.place == "quota" else None,
    )
    tokens, seconds, cpu = map(float, done.stdout.split())
    return tokens / seconds, 1000 * cpu / tokens


def measure(arguments, n_threads):
    caches = {"f16": "", "balanced": arguments.plugin}
    if arguments.before:
        caches["balanced before"] = arguments.before
    runs = {cache: [] for cache in caches}
    for _ in range(arguments.rounds):
        for cache, plugin in caches.items():
            runs[cache].append(decode(arguments, plugin, n_threads))
    for cache, found in runs.items():
        rates, times = zip(*found)
        yield {
            "place": arguments.place,
            "quota": arguments.quota if arguments.place == "quota" else "",
            "threads_of": arguments.build,
            "threads": n_threads,
            "cache": cache,
            "tokens_per_s": round(statistics.median(rates), 3),
            "cpu_ms": round(statistics.median(times), 2),
            "rounds": arguments.rounds,
            "load": os.getloadavg()[0],
        }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("decode")
    parser.add_argument("libraries")
    parser.add_argument("plugin")
    parser.add_argument("model")
    parser.add_argument("--build", required=True, help="whose threads are used, OpenMP or ggml")
    parser.add_argument("--place", default="all", choices=["core", "all", "neighbour", "quota"])
    parser.add_argument("--quota", type=float, default=1.0, metavar="CPUS")
    parser.add_argument("--threads", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--before", help="another plug-in to compare with")
    parser.add_argument("--json", action="store_true", required=True)
    arguments = parser.parse_args()
    if arguments.place == "quota":
        make_group(arguments.quota)
    neighbours = start_neighbours() if arguments.place == "neighbour" else []
    try:
        rows = [row for n in arguments.threads.split(",") for row in measure(arguments, int(n))]
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
        if arguments.place == "quota":
            GROUP.rmdir()
    json.dump(rows, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
