"""Memory of caches: computed for shapes of models, and measured in processes."""

from caches import BY_SIZE, MIB, MODELS, label, memory, on_gpu, quality
from results import like
from text import code, table, times

CONTEXTS = (1024, 4096, 32768, 131072)


def _relative(results, shape, contexts, caches):
    rows = [
        [label(cache)]
        + [
            times(memory(results, shape, cache, tokens) / memory(results, shape, "f16", tokens))
            for tokens in contexts
        ]
        for cache in caches
    ]
    return table(["tokens", *(f"{tokens:,}" for tokens in contexts)], *rows)


def memory_short(results):
    """Computed memory of presets and q4_0 relative to f16 by context, in SmolLM2's shape."""
    caches = ("q8_0", "q4_0", "quality", "balanced", "small", "tiny")
    return _relative(results, "SmolLM2-135M", (256, 512, 1024, 2048, 4096, 16384), caches)


def memory_relative(results):
    """Computed memory of caches relative to f16 by context, in an 8B model's shape."""
    caches = ("q8_0", "quality", "balanced", "q4_0", "small")
    return _relative(results, "Llama 3.1 8B", CONTEXTS, caches)


def memory_measured(results):
    """Measured MiB of a full cache of 2048 tokens in llama.cpp on a CPU, on three models."""
    rows = [
        [label(cache)]
        + [f"{quality(results, m, cache).number('kv_bytes') / MIB:.1f}" for m in MODELS]
        for cache in BY_SIZE
    ]
    return table(["KV cache", *(f"MiB, {name}" for name in MODELS.values())], *rows)


def memory_gpu(results):
    """Measured GPU memory of llama.cpp, 8B shape: the cache's pages, and the whole process."""
    rows = []
    for cache in ("f16", "q8_0", "quality", "balanced", "q4_0", "small", "turboquant-4"):
        row, machines = [label(cache) if cache in BY_SIZE else f"kvant {code(cache)}"], []
        for context in (32768, 131072):
            wanted = {"cache": on_gpu(cache), "command": like(f".*-[cd] {context} .*")}
            line = results.maybe("llama_cuda_memory.csv", wanted)
            for column in ("true bits MiB", "nvidia-smi MiB more"):
                row.append(f"{line.number(column) / 1024:.1f}" if line else "")
            machines += [line["machine"]] if line else []
        if machines:
            rows.append([*row, ", ".join(dict.fromkeys(machines))])
    ways = ("pages, GiB", "process, GiB")
    heading = [f"{way} at {context}" for context in ("32k", "128k") for way in ways]
    return table(["KV cache", *heading, "GPU"], *rows)


def memory_parts(results):
    """The memory of a context of 32,768 tokens of an 8B shape on a GPU, part by part."""
    columns = ("kvant MiB, largest", "kvant MiB after 28000 tokens", "f16 MiB")
    lines = results.lines("llama_cuda_parts.csv")
    sums = [sum(line.number(column) for line in lines) for column in columns]
    parts = [[line["part"], *(line.number(column) for column in columns)] for line in lines]
    rows = [
        [name, *(f"{number:,.0f}" for number in numbers)]
        for name, *numbers in [*parts, ["all", *sums]]
    ]
    return table(["part", "while kvant learns", "at 28,000 tokens", "llama.cpp `f16`"], *rows)
