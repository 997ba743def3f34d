"""The figures by which a user of transformers or vLLM decides: README's two figures, and the one
table of vLLM. transformers.py and vllm.py have all tables."""

from results import Missing, like
from tables import transformers, vllm
from text import table, times

GPU = "NVIDIA H200"
CACHES = ("fp8", "int4", "turboquant4", "balanced", "quality", "small")
SHAPES = ((1, 1024), (64, 4096), (8, 32768), (256, 8192))
FIRST = (1, 8192)


def _tokens(results):
    """{name of a cache: tokens in the same memory, relative to bfloat16}"""
    rows = [[cell.strip() for cell in row.split("|")[1:3]] for row in vllm.vllm_bytes(results)[2:]]
    most = float(dict(rows)["bfloat16"])
    return {name: times(most / float(size)) for name, size in rows}


def _relative(results, cache, shape, column, text):
    of = {"device": GPU, "command": like(r"bench_vllm\.py speed")}
    pair = vllm._pair(results, cache, of, *shape, column)
    return text(pair[1].number(column) / pair[0].number(column)) if pair else ""


def vllm_choice(results):
    """vLLM's caches relative to bfloat16: tokens in the same memory, speed, wait for a token."""
    tokens, rows = _tokens(results), []
    for cache in CACHES:
        name = vllm.NAMES[cache]
        speeds = [_relative(results, cache, shape, "tpot_ms", times) for shape in SHAPES]
        wait = _relative(results, cache, FIRST, "ttft_ms", lambda speed: times(1 / speed))
        rows.append([name, tokens[name], *speeds, wait])
    shapes = [f"speed, {batch} x {context:,}" for batch, context in SHAPES]
    heading = ["KV cache", "tokens in the same memory", *shapes, "wait for the first token"]
    return table(heading, *rows)


def transformers_gain(results):
    """Speed of a KvantCache relative to DynamicCache: 8 sequences of 32,768 tokens, 8B shape."""
    of = (transformers._of(cache, 8, 32768) for cache in ("kvant", transformers.RIVAL))
    pair = results.pair(transformers.FILE, *of, transformers.RUN)
    if not pair:
        raise Missing(f"{transformers.FILE} has no run with both caches")
    return f"{pair[0].number('tokens_per_s') / pair[1].number('tokens_per_s'):.1f}"
