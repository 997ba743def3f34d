"""PyTorch's operators torch.ops.kvant, around the C interface by pointer and stream. They are not
linked to PyTorch, so any version from 2.6 on will do. CPU and CUDA tensors use the same code.

    import kvant.torch
    pages = torch.ops.kvant.encode(rows, "trellis-4", "k")           # rows [n, head_dim]
    rows = torch.ops.kvant.decode(pages, "trellis-4", "k", head_dim, n)

cache_append and cache_attend work on a kvant.Cache, named by the number that register returns."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from typing import Any, Sequence

from .extras import needs

needs("torch", "torch")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from . import checks  # noqa: E402
from . import structs as s  # noqa: E402
from .cache import Cache  # noqa: E402
from .codec import Codec  # noqa: E402
from .gpu import GpuCodec, call, pointer  # noqa: E402
from .library import PAGE_TOKENS  # noqa: E402

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # kvant_cuda_type

_MOST_QUERIES = {
    "cpu": 2048,
    "cuda": 128,
}  # tokens of a call whose queries are noted; from a GPU they travel

_operators = torch.library.Library("kvant", "FRAGMENT")
_operators.define(
    "encode(Tensor rows, str spec, str role, Tensor? center=None, Tensor? scale=None) -> Tensor"
)
_operators.define(
    "decode(Tensor pages, str spec, str role, int head_dim, int n, Tensor? center=None, "
    "Tensor? scale=None) -> Tensor"
)
_operators.define(
    "cache_append(Tensor(a!) lengths, Tensor k, Tensor v, int cache, int layer, int[] sequences, "
    "Tensor? q=None) -> ()"
)
_operators.define(
    "cache_attend(Tensor lengths, Tensor q, int cache, int layer, int[] sequences, "
    "int v_head_dim, Tensor? mask=None, Tensor? sinks=None, int window=0, bool causal=True, "
    "float? scale=None, float? softcap=None, bool exact=False) "
    "-> Tensor"
)
_operators.define(
    "cache_step(Tensor(a!) lengths, Tensor q, Tensor k, Tensor v, int cache, int layer, "
    "Tensor? sinks=None, "
    "int window=0, float? scale=None, float? softcap=None) -> Tensor"
)


def _implement(name: str) -> Any:
    def take(function: Any) -> Any:
        for device in ("CPU", "CUDA"):
            _operators.impl(name, function, device)
        return function

    return take


# Rows and pages


@functools.lru_cache(maxsize=256)
def _codec(spec: str, head_dim: int, role: str) -> Codec:
    return Codec(spec, head_dim, role)


@functools.lru_cache(maxsize=256)
def _gpu_codec(spec: str, head_dim: int, role: str) -> Any:
    return GpuCodec.of(_codec(spec, head_dim, role))


def _channels(value: Tensor | None, like: Tensor) -> Tensor | None:
    return None if value is None else value.to(like.device, torch.float32).contiguous()


def _check_rows(rows: Tensor) -> None:
    if rows.dim() != 2 or rows.dtype not in _TYPES:
        raise ValueError(
            "rows: float32, float16 or bfloat16 [n, head_dim] is needed, "
            f"not {rows.dtype} {list(rows.shape)}"
        )


@_implement("encode")
def _encode(
    rows: Tensor, spec: str, role: str, center: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    _check_rows(rows)
    center = _channels(center, rows)
    scale = _channels(scale, rows)
    codec = _codec(spec, rows.shape[1], role)
    if rows.device.type == "cpu":
        return torch.from_numpy(codec.encode(rows.float(), center, scale))
    n, rows = rows.shape[0], rows.contiguous()
    pages = rows.new_zeros((-(-n // PAGE_TOKENS), codec.page_bytes), dtype=torch.uint8)
    slots = torch.arange(n, device=rows.device)
    part = s.CudaRows(
        codec=_gpu_codec(spec, rows.shape[1], role).handle,
        pages=s.CudaPages(pages.data_ptr(), codec.page_bytes, codec.page_bytes),
        rows=rows.data_ptr(),
        token_stride=rows.shape[1],
        head_stride=rows.shape[1],
        center=pointer(center),
        scale=pointer(scale),
    )
    arguments = s.CudaAppendArgs.new(
        type=_TYPES[rows.dtype], n_tokens=n, n_kv_heads=1, slots=slots.data_ptr()
    )
    setattr(arguments, role, part)
    call("append", arguments, rows.device)
    return pages


@_implement("decode")
def _decode(
    pages: Tensor,
    spec: str,
    role: str,
    head_dim: int,
    n: int,
    center: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    center = _channels(center, pages)
    scale = _channels(scale, pages)
    codec = _codec(spec, head_dim, role)
    if pages.device.type == "cpu":
        return torch.from_numpy(codec.decode(pages, n, center, scale))
    pages = pages.contiguous()
    blocks = torch.arange(pages.shape[0], device=pages.device, dtype=torch.int32)
    out = pages.new_empty((PAGE_TOKENS * pages.shape[0], head_dim), dtype=torch.float32)
    arguments = s.CudaDecodeArgs.new(
        codec=_gpu_codec(spec, head_dim, role).handle,
        pages=s.CudaPages(pages.data_ptr(), codec.page_bytes, codec.page_bytes),
        blocks=blocks.data_ptr(),
        n_blocks=pages.shape[0],
        n_kv_heads=1,
        type=_TYPES[out.dtype],
        out=out.data_ptr(),
        token_stride=head_dim,
        head_stride=head_dim,
        center=pointer(center),
        scale=pointer(scale),
    )
    call("decode", arguments, pages.device)
    return out[:n].clone()


@torch.library.register_fake("kvant::encode", lib=_operators)
def _encode_shape(rows: Tensor, spec: str, role: str, *options: Any, **named: Any) -> Tensor:
    torch._check(rows.dim() == 2)
    page_bytes = _codec(spec, int(rows.shape[1]), role).page_bytes
    return rows.new_empty(
        ((rows.shape[0] + PAGE_TOKENS - 1) // PAGE_TOKENS, page_bytes), dtype=torch.uint8
    )


@torch.library.register_fake("kvant::decode", lib=_operators)
def _decode_shape(
    pages: Tensor, spec: str, role: str, head_dim: int, n: int, *options: Any, **named: Any
) -> Tensor:
    return pages.new_empty((n, head_dim), dtype=torch.float32)


# Caches

_caches: weakref.WeakValueDictionary[int, Cache] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(cache: Cache) -> tuple[int, Tensor]:
    """Returns the number by which operators know a cache, and the tensor of its layers' lengths
    that operators take: int64 [n_layers], the tokens appended to each layer. For torch.compile it
    orders the calls that change the cache. Keep the cache alive."""
    number = next(_numbers)
    _caches[number] = cache
    return number, torch.zeros(cache.n_layers, dtype=torch.int64, device="cpu")


def _cache(number: int) -> Cache:
    cache = _caches.get(number)
    if cache is None:
        raise ValueError(f"cache: there is no cache {number}, or it is gone")
    return cache


def on_its_gpu(like: Tensor) -> Any:
    """Makes a cache's GPU the current one: the cache requires that in every call."""
    return (
        torch.cuda.device(like.device) if like.device.type == "cuda" else contextlib.nullcontext()
    )


def _plain(rows: Tensor) -> Tensor:
    return rows.detach().to(torch.float32).contiguous()


@_implement("cache_append")
def _cache_append(
    lengths: Tensor,
    k: Tensor,
    v: Tensor,
    cache: int,
    layer: int,
    sequences: Sequence[int],
    q: Tensor | None = None,
) -> None:
    """k and v: [sequences, n, kv heads, head_dim] of any float type; `q`: the queries of the same
    tokens, [sequences, n, heads, head_dim], which the cache may learn from."""
    held = _cache(cache)
    with on_its_gpu(k):
        if q is not None and held.wants_queries(layer, q.shape[1]):
            step = max(1, q.shape[1] // _MOST_QUERIES[q.device.type])
            later = torch.arange(0, q.shape[1], step, dtype=torch.int32, device="cpu")
            for queries, sequence in zip(q.detach()[:, ::step], sequences):
                rows = _plain(queries) if q.is_cuda else queries.to(torch.float32)
                held.note_queries(layer, rows, later + held.length(sequence, layer))
        held.append_batch(layer, sequences, _plain(k), _plain(v))
    lengths[layer] += k.shape[1]


@_implement("cache_attend")
def _cache_attend(
    lengths: Tensor,
    q: Tensor,
    cache: int,
    layer: int,
    sequences: Sequence[int],
    v_head_dim: int,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    window: int = 0,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    exact: bool = False,
) -> Tensor:
    """`q`: [sequences, n, heads, head_dim] of any float type; out has the same type. `mask`:
    float16 [sequences, n, tokens] with at least as many tokens as the longest sequence.
    kvant.Cache.attend describes all further options."""
    held, queries = _cache(cache), _plain(q)
    out = torch.empty((*q.shape[:3], v_head_dim), dtype=torch.float32, device=q.device)
    with on_its_gpu(q):
        if mask is None and sinks is None and causal and not (window or exact or scale or softcap):
            return held.attend_batch(layer, sequences, queries, out=out).to(q.dtype)
        options: dict[str, Any] = dict(
            window=window, causal=causal, scale=scale, logit_softcap=softcap, exact=exact
        )
        options["sinks"] = None if sinks is None else _plain(sinks)
        for i, sequence in enumerate(sequences):
            if mask is not None:
                options["mask"] = (
                    mask[i, :, : held.length(sequence, layer)].to(torch.float16).contiguous()
                )
            held.attend(layer, sequence, queries[i], out=out[i], **options)
        return out.to(q.dtype)


def stream_of(like: Tensor) -> int:
    return torch.cuda.current_stream(like.device).cuda_stream if like.device.type == "cuda" else 0


@_implement("cache_step")
def _cache_step(
    lengths: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: int,
    layer: int,
    sinks: Tensor | None = None,
    window: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of one token of each sequence of kvant.Cache.begin_steps: q [sequences, heads,
    head_dim], k and v [sequences, kv heads, head_dim] of one dtype, which out has, too. For CUDA
    graphs: nothing here depends on the step."""
    q, k, v = (x.detach().contiguous() for x in (q, k, v))
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _TYPES:
        raise ValueError(
            f"q, k, v: one dtype of {list(_TYPES)} is needed, not {q.dtype}, {k.dtype}, {v.dtype}"
        )
    held, out, sinks = _cache(cache), torch.empty_like(q), None if sinks is None else _plain(sinks)
    for x, name, heads in (
        (q, "q", held.n_heads),
        (k, "k", held.n_kv_heads),
        (v, "v", held.n_kv_heads),
    ):
        checks.shapes(tuple(x.shape), name, (held.n_stepping, heads, held.head_dim))
    step = s.Step.new(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        out=out.data_ptr(),
        type=_TYPES[q.dtype],
        window=window,
        scale=scale or 0,
        logit_softcap=softcap or 0,
        stream=stream_of(q) or None,
        sinks=pointer(sinks),
    )
    with on_its_gpu(q):
        held.step(layer, step)
    return out


@torch.library.register_fake("kvant::cache_step", lib=_operators)
def _cache_step_shape(lengths: Tensor, q: Tensor, *others: Any, **named: Any) -> Tensor:
    return torch.empty_like(q)


def read(cache: Cache, layer: int, sequence: int, n: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The first n keys and values of a sequence, float32 [n, kv heads, head_dim], on the device of
    `like`."""
    shape = n, cache.n_kv_heads
    k, v = (
        torch.empty((*shape, d), dtype=torch.float32, device=like.device)
        for d in (cache.head_dim, cache.v_head_dim)
    )
    with on_its_gpu(like):
        cache.read_to(layer, sequence, 0, k, v)
    return k, v


@torch.library.register_fake("kvant::cache_append", lib=_operators)
def _cache_append_shape(*arguments: Any, **named: Any) -> None:
    return None


@torch.library.register_fake("kvant::cache_attend", lib=_operators)
def _cache_attend_shape(
    lengths: Tensor,
    q: Tensor,
    cache: int,
    layer: int,
    sequences: Any,
    v_head_dim: int,
    *options: Any,
    **named: Any,
) -> Tensor:
    return q.new_empty((*q.shape[:3], v_head_dim))
