"""The caches that tables compare: their names on pages, their memory, their lines in results."""

from results import Missing, one_of
from text import code, divergence

PRESETS = ("quality", "balanced", "small", "tiny")
STOCK = ("f16", "q8_0", "q4_0")
# By size at long contexts, largest first.
BY_SIZE = ("f16", "q8_0", "quality", "balanced", "q4_0", "small", "tiny")
MODELS = {
    "SmolLM2-135M": "SmolLM2-135M",
    "Qwen2.5-Coder-0.5B": "Qwen2.5-0.5B",
    "Gemma-3-270M": "Gemma-3-270M",
}
# The second half of contexts of 2048 tokens.
TEXT = {"text": "wiki.test.raw", "from": 1024, "to": 2046}
MIB, GIB = 2**20, 2**30


def label(cache):
    """The name of a cache of llama.cpp, or of a preset, in tables."""
    if cache in STOCK:
        return f"llama.cpp {code(cache)}"
    return f"kvant {code(cache)}" + (" (default)" if cache == "balanced" else "")


def state(results, cache):
    """The line of a saved state of 32,768 tokens of an 8B shape."""
    return results.newest("state_disk.csv", {"cache": cache})


def stock_quality(results, model, cache):
    """The line of one of llama.cpp's own caches, of the run that default_quality() takes balanced
    from: so the lines of a table have the same machine, build and chunks of the text."""
    preset = default_quality(results, model, "balanced")
    same = {name: preset[name] for name in ("date", "machine", "commit", "command")}
    wanted = {"model": model, "cache": "llama.cpp", "k": cache, "v": cache, **TEXT, **same}
    return results.newest("quality_first.csv", wanted)


def default_quality(results, model, preset):
    """The line of a preset as `kvant exec` uses it, nothing calibrated, on the same tokens."""
    wanted = {"model": model, "preset": preset, "calibration": "", **TEXT}
    return results.newest("quality_first.csv", wanted)


def quality(results, model, cache):
    find = stock_quality if cache in STOCK else default_quality
    return find(results, model, cache)


def specs(results, preset):
    """The columns k and v of a preset that learns, as its newest line has them."""
    line = default_quality(results, "SmolLM2-135M", preset)
    return {"k": line["k"], "v": line["v"], "calibration": ""}


def memory(results, model, cache, context):
    """Bytes of a cache, everything counted: pages and transforms."""
    wanted = {"model": model, "cache": cache, "context": context}
    line = results.newest("sizes.csv", wanted)
    return line.number("pages_bytes") + line.number("transforms_bytes")


def memory_on_gpu(results, model, cache, context):
    """Bytes of a cache in a GPU's memory, everything counted."""
    wanted = {"model": model, "memory": "gpu", "cache": cache, "context": context}
    return results.newest("fit.csv", wanted).number("kv_bytes")


def bits(results, model, cache, context):
    """Bits per number at this context, everything counted."""
    return 16 * memory(results, model, cache, context) / memory(results, model, "f16", context)


def machines(results, file, column="machine"):
    """The machines of a file, in order of first appearance."""
    found = dict.fromkeys(line[column] for line in results.lines(file))
    if not found:
        raise Missing(f"{file} names no machine")
    return list(found)


def context_name(tokens):
    """512, 4k, 32k: as column headings say it."""
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def on_gpu(cache):
    """A condition on the column `cache` of the GPU's files: this preset with nothing calibrated."""
    if cache not in PRESETS:
        return cache
    return one_of(cache, f"{cache}, not calibrated", f"{cache}, learning")


def divergence_cells(lines):
    """The cells of a row of KLDs; a line that was not measured gives an empty cell."""
    return [divergence(line.number("kld_mean")) if line else "" for line in lines]


def recipe_key(k):
    """The codec of keys in OCTOPUS's recipe, without the window that all of its codecs have."""
    return code(k.replace(",recent=32", "").replace(":recent=32", ""))
