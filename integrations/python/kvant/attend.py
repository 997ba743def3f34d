"""Attention over compressed keys and values: describes a problem of kvant/attention.h, and computes
it over tensors."""

from __future__ import annotations

import ctypes as c
import math
from typing import Any

from . import arrays, checks
from . import structs as s
from .arrays import np
from .library import PAGE_TOKENS, invoke
from .places import Host
from .tensor import Tensor


def problem(
    place: Any,
    q: Any,
    n_heads: int | None,
    dims: tuple[int, int],
    n_tokens: int,
    *,
    out: Any = None,
    lse: Any = None,
    mask: Any = None,
    sinks: Any = None,
    causal: bool = True,
    window: int = 0,
    scale: float | None = None,
    logit_softcap: float | None = None,
    max_bias: float = 0.0,
    exact: bool = False,
) -> tuple[Any, Any, list[Any]]:
    """Returns a kvant_attention_problem without the blocks, the output, and the objects that its
    pointers need alive. `dims`: head_dim of keys and of values. An option that is None is 0 in the
    struct, which means the library's default."""
    queries = place.take(q, "q", "float32", (None, n_heads, dims[0]), rows=True)
    n, heads = queries.shape[:2]
    out = place.new(q, (n, heads, dims[1])) if out is None else out
    written = place.give(out, "out", "float32", (n, heads, dims[1]))
    made = s.AttentionProblem.new(
        n_queries=n,
        n_tokens=n_tokens,
        n_heads=heads,
        q=queries.address,
        q_token_stride=queries.strides[0],
        q_head_stride=queries.strides[1],
        out=written.address,
        out_token_stride=heads * dims[1],
        out_head_stride=dims[1],
        scale=0 if scale is None else checks.number(scale, "scale"),
        logit_softcap=0 if logit_softcap is None else checks.number(logit_softcap, "logit_softcap"),
        max_bias=checks.number(max_bias, "max_bias"),
        window=checks.count(window, "window", least=0),
        causal=bool(causal),
        exact=bool(exact),
        mask_token_stride=n_tokens,
    )
    kept = [queries, written]
    if lse is not None:
        kept.append(place.give(lse, "lse", "float32", (n, heads)))
        made.lse = kept[-1].address
    if mask is not None:
        kept.append(place.take(mask, "mask", "float16", (n, n_tokens)))
        made.mask = kept[-1].address
    if sinks is not None:
        kept.append(place.take(sinks, "sinks", "float32", (heads,)))
        made.sinks = kept[-1].address
    return made, out, kept


def attention(
    k: Tensor,
    v: Tensor,
    q: np.ndarray,
    n_tokens: int,
    block_table: np.ndarray | None = None,
    first_block: int = 0,
    n_threads: int | None = None,
    **options: Any,
) -> np.ndarray:
    """softmax(scale q K^T) V of one sequence: q float32 [n, heads, head_dim], the newest n of its
    n_tokens tokens.

    Tokens 64 i to 64 i + 63 are in block block_table[i] (int32; a negative entry hides them), or in
    block first_block + i without a table. Cache.attend describes the options, all by name; scale is
    1 / sqrt(head_dim) by default. Returns out, float32 [n, heads, head_dim of v]. Slots that
    queries see must have been written."""
    dims = (k.codecs[0].head_dim, v.codecs[0].head_dim)
    options.setdefault("scale", 1 / math.sqrt(dims[0]))
    n_tokens = checks.count(n_tokens, "n_tokens", least=0)
    made, out, kept = problem(Host(), q, None, dims, n_tokens, **options)
    n_blocks = -(-n_tokens // PAGE_TOKENS)
    if block_table is not None:
        block_table = arrays.contiguous(block_table, "block_table", np.int32, (None,))
        if block_table.size < n_blocks:
            raise ValueError(
                f"block_table: {block_table.size} blocks are too few for {n_tokens} tokens"
            )
        checks.in_range(block_table[:n_blocks], "block_table", -(2**31), k.n_blocks)
        made.block_table = block_table.ctypes.data
    made.first_block = checks.count(first_block, "first_block", least=0)
    made.n_threads = checks.threads(n_threads)
    size = c.c_size_t()
    invoke("attention", "kvant_attention_workspace", k.handle, v.handle, made, c.byref(size))
    workspace = arrays.zeroed(size.value)
    given = k.handle, v.handle, made, workspace.ctypes.data, size.value
    invoke("attention", "kvant_attention", *given)
    return out
