"""Speed of llama.cpp on GPUs, 8B shape with random weights, relative to f16 in the same run."""

from caches import BY_SIZE, context_name, label
from results import has, like, one_of
from speed import COLUMNS, DECODE, DEPTHS, GPU_RUN, PROMPT, SEQUENCES, gpu_pair, gpus, ratio
from text import code, table, times

SPEED = "tokens/s"
CACHES = ("q8_0", "q4_0", "quality", "balanced", "small", "tiny", "turboquant-4")


def _name(cache):
    return label(cache) if cache in BY_SIZE else f"kvant {code(cache)}"


def _by_depth(results, what):
    """A row per GPU and cache, a column per depth. Empty cells were not measured."""
    rows = []
    for gpu, names in gpus(results).items():
        for cache in CACHES:
            pairs = [gpu_pair(results, cache, names, what, depth) for depth in COLUMNS]
            if any(pairs):
                cells = [times(ratio(pair, SPEED)) if pair else "" for pair in pairs]
                rows.append([_name(cache), gpu, *cells])
    columns = [context_name(depth) for depth in COLUMNS]
    used = [i for i in range(len(columns)) if any(row[i + 2] for row in rows)]
    rows = [row[:2] + [row[i + 2] for i in used] for row in rows]
    return table(["KV cache", "GPU", *(columns[i] for i in used)], *rows)


def gpu_decode(results):
    """Decode speed relative to f16 by tokens in the cache, one sequence, 8B shape, GPUs."""
    return _by_depth(results, DECODE)


def gpu_prompt(results):
    """Speed of prompts of 512 tokens relative to f16 by tokens in the cache, 8B shape, GPUs."""
    return _by_depth(results, PROMPT)


def gpu_sequences(results):
    """Decode speed of 16 sequences of 8192 tokens relative to f16, 8B shape, GPUs."""
    rows = []
    for gpu, names in gpus(results).items():
        for cache in CACHES:
            pair = gpu_pair(results, cache, names, SEQUENCES, 8192)
            if pair:
                ours, f16 = (f"{line.number(SPEED):.0f}" for line in pair)
                rows.append([_name(cache), gpu, ours, f16, times(ratio(pair, SPEED))])
    return table(["KV cache", "GPU", "tokens/s", "tokens/s, `f16`", "times"], *rows)


def gpu_first_prompt(results):
    """Speed of the first prompt of a cache relative to f16, while presets learn, 8B shape."""
    lengths, rows = (512, 1024, 2048), []
    for gpu, names in gpus(results).items():
        for cache in CACHES:
            # At depth 0 llama-bench empties the cache before each prompt, so each is a first one.
            whats = [like(f"pp{n}(, the first prompt of a cache)?") for n in lengths]
            pairs = [gpu_pair(results, cache, names, what, 0) for what in whats]
            if any(pairs):
                cells = [times(ratio(pair, SPEED)) if pair else "" for pair in pairs]
                rows.append([_name(cache), gpu, *cells])
    return table(["KV cache", "GPU", *(f"{n} tokens" for n in lengths)], *rows)


def gpu_tokens_per_second(results):
    """Tokens per second of balanced and of f16 in the newest run that has both, 8B shape, GPUs."""
    rows = []
    for gpu, names in gpus(results).items():
        for depth in DEPTHS:
            found = [gpu_pair(results, "balanced", names, what, depth) for what in (DECODE, PROMPT)]
            if any(found):
                cells = [f"{x.number(SPEED):.0f}" if p else "" for p in found for x in p or (0, 0)]
                rows.append([gpu, f"{depth:,}", *cells])
    heading = ["GPU", "tokens in the cache", "decode, `balanced`", "decode, `f16`"]
    return table([*heading, "prompt of 512, `balanced`", "prompt of 512, `f16`"], *rows)


def gpu_accel(results):
    """--accel on a GPU: decode speed of q8_0 and q4_0 relative to llama.cpp's with that type."""
    rows = []
    for gpu, names in gpus(results).items():
        for cache in ("q8_0", "q4_0"):
            pairs = [gpu_pair(results, f"{cache} accel", names, DECODE, d, cache) for d in DEPTHS]
            for depth, pair in zip(DEPTHS, pairs):
                if pair:
                    ours, theirs = (f"{line.number(SPEED):.0f}" for line in pair)
                    row = [code(cache), gpu, f"{depth:,}", theirs, ours]
                    rows.append([*row, times(ratio(pair, SPEED))])
    heading = ["cache", "GPU", "tokens in the cache", "llama.cpp, tokens/s"]
    return table([*heading, "`--accel`, tokens/s", "times"], *rows)


def gpu_split(results):
    """Two GPUs: speed of balanced relative to f16 with -sm layer and with -sm tensor."""
    rows = []
    machines = {
        m for m in (line["machine"] for line in results.lines("llama_cuda.csv")) if " x " in m
    }
    for machine in sorted(machines):
        for mode in ("layer", "tensor"):
            row = [f"`-sm {mode}`", machine]
            for what, depth in (("tg", "0"), ("tg", "4096"), ("pp512", "0"), ("pp512", "4096")):
                of = {
                    "machine": machine,
                    "command": has(f"-sm {mode}"),
                    "what": what,
                    "depth": depth,
                }
                ours = {**of, "cache": one_of("balanced", "balanced, not calibrated")}
                pair = results.pair("llama_cuda.csv", ours, {**of, "cache": "f16"}, GPU_RUN)
                row.append(times(ratio(pair, SPEED)) if pair else "")
            rows.append(row)
    heading = ["layers are split by", "GPUs", "decode at 0", "decode at 4k", "prompt at 0"]
    return table([*heading, "prompt at 4k"], *rows)
