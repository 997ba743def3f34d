"""Speed relative to a rival of the same run, from llama.cpp's measurements on CPUs and on GPUs."""

import re

from caches import PRESETS, machines, on_gpu, specs
from results import like, one_of, starts, where

CPU_RUN = ("machine", "commit", "command", "depth")
CPU_F16 = {"cache": "llama.cpp", "k": "f16", "v": "f16"}
CPU_MODEL = "SmolLM2"  # the model itself, or a file of its shape with random weights
GPU_RUN = ("machine", "commit", "command", "what", "depth", "model")
GPU_MODEL = "8B shape"
# The depths of the file that count for a depth of a table: some runs stop a little below 32k.
DEPTHS = {
    0: ("0",),
    512: ("512",),
    4096: ("4096",),
    8192: ("8192",),
    32768: ("30000", "32000", "32768"),
    131072: ("131072",),
}
# The columns of tables by depth.
COLUMNS = (0, 4096, 32768, 131072)
DECODE, PROMPT, SEQUENCES = like(r"tg(64|96|128)?"), like("pp512"), like("tg.*16 sequences")


def cpu_name(machine, command):
    """Intel Xeon, 8 threads: the processor, and the threads that the measurement used."""
    name, _, threads = machine.rpartition(", ")
    used = re.search(r" -t (\d+)", command)
    name = re.sub(r"\(R\)| Processor", "", name)
    return f"{name}, {used[1]} threads" if used else f"{name}, {threads}"


def cpus(results):
    """The CPUs of speed_presets.csv: {name: the newest machine of that name}."""
    lines = [x for x in results.lines("speed_presets.csv") if CPU_MODEL in x["command"]]
    return {cpu_name(line["machine"], line["command"]): line["machine"] for line in lines}


def gpu_name(machine):
    """H100, whatever the driver adds to the name; 2 x H100 stays another machine."""
    found = re.search(r"^(\d+ x )?.*?(H\d+|A\d+|L\d+|RTX \w+)", machine)
    return (found[1] or "") + found[2] if found else machine


def gpus(results):
    """The GPUs of llama_cuda.csv by name, single ones only: {name: the machine strings}."""
    found = {}
    for machine in machines(results, "llama_cuda.csv"):
        if " x " not in machine:
            found.setdefault(gpu_name(machine), []).append(machine)
    return dict(sorted(found.items()))


def cpu_pair(results, cache, name, depth, column):
    """The newest line of a preset that learns, or of one of llama.cpp's caches, and f16's line;
    both have a number in the column. If a run has several such pairs, this is the pair with the
    median ratio."""
    machine = cpus(results)[name]
    wanted = specs(results, cache) if cache in PRESETS else {"k": cache, "v": cache}
    named = where(lambda cell: CPU_MODEL in cell and cpu_name(machine, cell) == name, name)
    of = {"command": named, "machine": machine, "depth": depth, column: like(".+")}
    ours, theirs = {**wanted, **of}, {**CPU_F16, **of}
    newest = results.pair("speed_presets.csv", ours, theirs, CPU_RUN)
    if not newest:
        return None
    run = {name: newest[0][name] for name in CPU_RUN}
    same = results.pairs("speed_presets.csv", {**ours, **run}, theirs, CPU_RUN)
    return sorted(same, key=lambda pair: ratio(pair, column))[(len(same) - 1) // 2]


def gpu_pair(results, cache, machine_names, what, depth, rival="f16"):
    """The newest line of a cache on a GPU, and the rival's line of the same run."""
    of = {
        "model": starts(GPU_MODEL),
        "machine": one_of(*machine_names),
        "what": what,
        "depth": one_of(*DEPTHS[depth]),
    }
    ours, theirs = {**of, "cache": on_gpu(cache)}, {**of, "cache": rival}
    return results.pair("llama_cuda.csv", ours, theirs, GPU_RUN)


def ratio(pair, column):
    """How many times as fast as the rival; None without a pair."""
    return pair and pair[0].number(column) / pair[1].number(column)
