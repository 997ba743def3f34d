"""Quality of presets and of llama.cpp's caches: mean KL divergence from the f16 cache."""

from results import starts
from text import code, divergence, table

MODELS = {
    "SmolLM2-135M": "SmolLM2-135M",
    "Qwen2.5-Coder-0.5B": "Qwen2.5-0.5B",
    "Gemma-3-270M": "Gemma-3-270M",
}
PRESETS = ("quality", "balanced", "small", "tiny")
# The second half of contexts of 2048 tokens: what quality.csv measures for every cache.
TEXT = {"text": "wiki.test.raw", "from": 1024, "to": 2046}


def _stock(results, cache, model):
    """A line of llama.cpp's own cache."""
    wanted = {"model": starts(model), "cache": "llama.cpp", "k": cache, "v": cache}
    return results.newest("quality.csv", wanted)


def _default(results, preset, model):
    """A line of a preset as `kvant exec` uses it: nothing calibrated."""
    wanted = {"model": model, "preset": preset, "calibration": "", **TEXT}
    return results.newest("quality_first.csv", wanted)


def kld_default(results):
    """Mean KLD of presets that learn from the prompt, and of q8_0 and q4_0, on three models."""
    caches = [("llama.cpp", "q8_0", _stock), ("llama.cpp", "q4_0", _stock)]
    caches += [("kvant", preset, _default) for preset in PRESETS]
    rows = [
        [f"{owner} {code(name)}"]
        + [divergence(find(results, name, model).number("kld_mean")) for model in MODELS]
        for owner, name, find in caches
    ]
    return table(["KV cache", *(f"KLD, {name}" for name in MODELS.values())], *rows)
