"""Watches models of transformers: a callable sees the queries, keys and values of each attention
layer. kvant.calibrate and kvant.tune gather with it."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from .transformers import attention
from .transformers.masks import guarded, plain


class Seen(NamedTuple):
    """The tensors of one attention layer, of the first sequence: q, k and v are [heads, tokens,
    head_dim]."""

    module: Any
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any
    window: int
    scale: float
    softcap: float
    s_aux: Tensor | None


_watcher: ContextVar[Callable[[Seen], None]] = ContextVar("watcher")


def _watched(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    whole, shape = plain(attention_mask)
    window = options.get("sliding_window") or 0 if shape is None else shape.window
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    _watcher.get()(
        Seen(module, query[0], key[0], value[0], whole, window, scale, softcap or 0.0, s_aux)
    )
    named: dict[str, Any] = dict(scaling=scaling, softcap=softcap, s_aux=s_aux)
    return attention(module, query, key, value, attention_mask, **named, **options)


AttentionInterface.register("kvant_watched", _watched)
AttentionMaskInterface.register("kvant_watched", guarded)


@contextlib.contextmanager
def attending(model: Any, implementation: str) -> Iterator[None]:
    """Within the block the model uses this attention, evaluates and keeps no gradients."""
    before = model.config._attn_implementation
    training = model.training
    model.set_attn_implementation(implementation)
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.set_attn_implementation(before)
        model.train(training)


def watch(
    model: Any,
    parts: Sequence[Tensor],
    watcher: Callable[[Seen], None],
    progress: Callable[[float], None] | None = None,
    positions: int = 0,
) -> None:
    """Runs the model over token ids [n] of each part; watcher sees the tensors of every attention
    layer. progress is called with the share of the tokens that is done. The parts' positions are
    spread over 0 .. positions - 1."""
    total, done = sum(map(len, parts)), 0
    token = _watcher.set(watcher)
    try:
        with attending(model, "kvant_watched"):
            for i, part in enumerate(parts):
                first = max(positions - len(part), 0) * i // max(len(parts) - 1, 1)
                places = torch.arange(first, first + len(part), device=model.device)[None]
                model(
                    part[None].to(model.device),
                    position_ids=places,
                    use_cache=False,
                    logits_to_keep=1,
                )
                done += len(part)
                if progress:
                    progress(done / total)
    finally:
        _watcher.reset(token)


def model_name(model: Any) -> str:
    """The path that the model was loaded from, or its kind."""
    return str(getattr(model.config, "_name_or_path", "") or model.config.model_type)
