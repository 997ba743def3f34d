"""Masks of the attention implementation "kvant". Causal masks and sliding windows stay two numbers,
so that no matrix of queries and keys is made; every other mask is one."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionMaskInterface, masking_utils
from transformers.masking_utils import causal_mask_function, sdpa_mask


class Shape(NamedTuple):
    """What a two-dimensional mask leaves out. window: tokens that a query sees, itself included; 0:
    all. hidden: per sequence the number of tokens at its beginning that nobody sees (padding on
    the left). holes: other tokens are hidden, too."""

    window: int
    hidden: tuple[int, ...]
    holes: bool


def _cells(function: Callable[..., Any]) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


def window_of(function: Callable[..., Any]) -> int | None:
    """The window of a mask function of transformers that is causal (0: no window), None for every
    other one. Functions are known by their code, because transformers makes new ones all the time."""
    if function is causal_mask_function:
        return 0
    if getattr(function, "__code__", None) is not masking_utils.and_masks(causal_mask_function).__code__:
        return None
    parts = [part for cell in _cells(function) if isinstance(cell, tuple) for part in cell]
    if len(parts) != 2 or parts[1] is not causal_mask_function:
        return None
    overlay = masking_utils.sliding_window_overlay(1)
    numbers = _cells(parts[0])
    if parts[0].__code__ is not overlay.__code__ or len(numbers) != 1 or not isinstance(numbers[0], int):
        return None
    return numbers[0]


def shape_of(padding: Tensor | None, batch: int, window: int) -> Shape:
    """padding: bool [batch, tokens], True for tokens that are seen, or None."""
    if padding is None or bool(padding.all()):
        return Shape(window, (0,) * batch, False)
    seen = padding.to(torch.int8).cpu()
    hidden = torch.where(seen.any(1), seen.argmax(1), seen.shape[1])
    holes = bool((seen.sum(1) != seen.shape[1] - hidden).any())
    return Shape(window, tuple(hidden.tolist()), holes)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """bool [batch, kv_length] with an attribute kvant, its Shape; or, where that cannot say it all,
    bool [batch, 1, q_length, kv_length]."""
    window = window_of(mask_function)
    fits = attention_mask is None or attention_mask.shape[1] == kv_length
    if (
        window is None
        or not fits
        or kv_offset != 0
        or not isinstance(q_offset, int)
        or q_offset + q_length != kv_length
    ):
        options["allow_is_causal_skip"] = options["allow_is_bidirectional_skip"] = False
        return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **options)
    if attention_mask is None:
        made = torch.ones((1, 1), dtype=torch.bool, device=options.get("device", "cpu")).expand(batch_size, kv_length)
    else:
        made = attention_mask.to(torch.bool).view(attention_mask.shape)
    made.kvant = shape_of(None if attention_mask is None else made, batch_size, window)  # type: ignore[attr-defined]
    return made


AttentionMaskInterface.register("kvant", mask)
