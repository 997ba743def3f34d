"""Speed of llama.cpp on CPUs: presets as `kvant exec` uses them, --accel, and threads."""

from caches import PRESETS, bits, context_name, label, quality
from results import has
from speed import cpu_pair, cpus, ratio
from text import code, divergence, table, times

DEPTHS = (0, 512, 4096)


DECODE = "decode_tps"
WAYS = {"decode": DECODE, "prompt": "prefill_tps"}


def _cell(results, cache, name, depth, column):
    pair = cpu_pair(results, cache, name, depth, column)
    return times(ratio(pair, column)) if pair else ""


def cpu_speed(results):
    """Decode and prompt speed of caches relative to f16 on CPUs by depth, SmolLM2's shape."""
    rows = []
    for name in cpus(results):
        for cache in ("q8_0", "q4_0", *PRESETS):
            cells = [_cell(results, cache, name, d, c) for c in WAYS.values() for d in DEPTHS]
            if any(cells):
                rows.append([label(cache), name, *cells])
    columns = [f"{way}, {context_name(d)}" for way in WAYS for d in DEPTHS]
    return table(["KV cache", "CPU", *columns], *rows)


def _tokens_per_second(results, name, depth, column):
    """Cells of balanced and of f16."""
    pair = cpu_pair(results, "balanced", name, depth, column) or ()
    return [f"{line.number(column):.0f}" for line in pair] or ["", ""]


def cpu_tokens_per_second(results):
    """Tokens per second behind cpu-speed for balanced and f16, SmolLM2."""
    rows = []
    for name in cpus(results):
        for depth in DEPTHS:
            found = (_tokens_per_second(results, name, depth, way) for way in WAYS.values())
            cells = [cell for pair in found for cell in pair]
            if any(cells):
                rows.append([name, f"{depth:,}", *cells])
    heading = ["CPU", "tokens in the cache", "decode, `balanced`", "decode, `f16`"]
    return table([*heading, "prompt, `balanced`", "prompt, `f16`"], *rows)


def cpu_presets(results):
    """The presets: bits per number with everything counted, KLD, and decode speed on CPUs."""
    rows = []
    for preset in PRESETS:
        row = [label(preset)]
        row += [f"{bits(results, 'Llama 3.1 8B', preset, n):.1f}" for n in (4096, 32768)]
        row.append(divergence(quality(results, "SmolLM2-135M", preset).number("kld_mean")))
        for depth in (0, 4096):
            found = (cpu_pair(results, preset, name, depth, DECODE) for name in cpus(results))
            ratios = [ratio(pair, DECODE) for pair in found if pair]
            ends = sorted({times(min(ratios)), times(max(ratios))}) if ratios else []
            row.append(" to ".join(ends))
        rows.append(row)
    heading = ["preset", "bits, 8B at 4k", "bits, 8B at 32k", "KLD, SmolLM2", "decode at 0"]
    return table([*heading, "decode at 4k"], *rows)


def cpu_accel(results):
    """--accel: llama.cpp's own q8_0 and q4_0 caches, tokens per second before and after."""
    rows = []
    for cache in ("q8_0", "q4_0"):
        wanted = {"k": cache, "v": cache, "depth": "4096", "command": has("--accel")}
        run = ("machine", "commit", "command", "depth")
        ours, theirs = {**wanted, "cache": "accel"}, {**wanted, "cache": "llama.cpp"}
        pair = results.pair("speed_smollm2.csv", ours, theirs, run)
        for column, way in (("decode_tps", "decode"), ("prefill_tps", "prompt of 128")):
            before, after = pair[1].number(column), pair[0].number(column)
            cells = [f"{before:.0f}", f"{after:.0f}", times(after / before)]
            rows.append([code(cache), way, *cells, pair[0]["machine"]])
    heading = ["cache", "tokens/s, 4096 in the cache", "llama.cpp", "`--accel`", "times"]
    return table([*heading, "CPU"], *rows)


def cpu_threads(results):
    """Tokens per second of f16 and balanced with more threads than cores (SmolLM2)."""
    places = {
        "all": "two cores",
        "core": "one core",
        "neighbour": "two cores, a busy program on each",
        "quota": "half a core (cgroup quota)",
    }
    rows = []
    keys = dict.fromkeys(
        (line["place"], line["threads_of"], line["threads"])
        for line in results.lines("threads.csv")
    )
    for place, threads_of, threads in keys:
        of = {"place": place, "threads_of": threads_of, "threads": threads}
        lines = [results.newest("threads.csv", {**of, "cache": c}) for c in ("f16", "balanced")]
        cells = [f"{line.number('tokens_per_s'):.0f}" for line in lines]
        rows.append([places.get(place, place), threads_of, threads, *cells])
    return table(["the process may use", "threads of", "threads", "`f16`", "`balanced`"], *rows)
