"""The one table of vLLM that a user needs to choose a codec; vllm.py has everything."""

from results import like
from tables import vllm
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
