"""The figures by which a user of transformers or vLLM decides: README's two figures, and the one
table of vLLM. transformers.py, vllm.py and serving.py have all tables."""

import serving
from results import Missing
from tables import transformers, vllm
from text import divergence, table, times

PRESETS = ("quality", "small")  # whose speed nobody measured in vllm_serving.csv
WITH_POOL = ("balanced", *PRESETS)
POOL = 0.03  # of the memory: their exact blocks (integrations/python/kvant/vllm/exact.py)
COLUMNS = {
    "speed, 1 x 1,024": ("filled", 1, 1024, "tpot_ms"),
    "speed, 64 x 4,096": ("filled", 64, 4096, "tpot_ms"),
    "speed, 8 x 32,768": ("filled", 8, 32768, "tpot_ms"),
    "tokens per second, 64 prompts of 8,192": ("served", 64, 8192, "tps_system"),
    "wait for the first token": ("prompt", 1, 8192, "ttft_ms"),
}


def _tokens(results):
    """{name of a cache: tokens in the same memory, relative to bfloat16}"""
    sizes = vllm._bytes(results)
    most, pools = sizes["bfloat16"], {f"kvant `{name}`" for name in WITH_POOL}
    rooms = ((name, 1 - POOL if name in pools else 1, size) for name, size in sizes.items())
    return {name: times(room * most / size) for name, room, size in rooms}


def _cell(results, cache, shape):
    column = shape[-1]
    pair = serving.pair(results, cache, *shape)
    if not pair:
        return ""
    ratio = pair[0].number(column) / pair[1].number(column)
    return times(1 / ratio if column == "tpot_ms" else ratio)


def _loss(results, cache):
    """The largest KLD of the models; empty if one was not measured."""
    lines = vllm._quality_of(results, "balanced" if cache == "kvant" else cache)
    return divergence(max(x.number("kld_mean") for x in lines)) if all(lines) else ""


def vllm_choice(results):
    """vLLM's caches: loss, tokens in the same memory, speed and wait relative to bfloat16."""
    tokens, rows = _tokens(results), []
    names = {**serving.NAMES, **{preset: f"`{preset}`" for preset in PRESETS}}
    for cache, name in names.items():
        shown = name if cache == "fp8" else f"kvant {name}"
        if cache != serving.RIVAL and shown in tokens:
            cells = [_cell(results, cache, shape) for shape in COLUMNS.values()]
            rows.append([shown, _loss(results, cache), tokens[shown], *cells])
    heading = ["KV cache", "largest KLD of three models", "tokens in the same memory", *COLUMNS]
    return table(heading, *rows)


def transformers_gain(results):
    """Speed of a KvantCache relative to DynamicCache: 8 sequences of 32,768 tokens, 8B shape."""
    of = (transformers._of(cache, 8, 32768) for cache in ("kvant", transformers.RIVAL))
    pair = results.pair(transformers.FILE, *of, transformers.RUN)
    if not pair:
        raise Missing(f"{transformers.FILE} has no run with both caches")
    return f"{pair[0].number('tokens_per_s') / pair[1].number('tokens_per_s'):.1f}"
