"""Masks of the attention implementation "kvant". A causal mask or a sliding window stays two
numbers, so that no matrix of queries and keys is made. Every other mask is a matrix."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AttentionMaskInterface, masking_utils
from transformers.masking_utils import causal_mask_function, sdpa_mask


class Shape(NamedTuple):
    """The tokens that a two-dimensional mask hides. `window`: tokens that a query token sees,
    itself included; 0: all. `hidden`: for each sequence the number of tokens at its beginning that
    no query sees (padding on the left). `holes`: other tokens are hidden, too."""

    window: int
    hidden: tuple[int, ...]
    holes: bool


def _cells(function: Callable[..., Any]) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


def window_of(function: Callable[..., Any]) -> int | None:
    """The window of a causal mask function of transformers (0: no window), and None for every other
    function. Functions are compared by their code, because transformers makes new ones all the
    time."""
    if function is causal_mask_function:
        return 0
    if (
        getattr(function, "__code__", None)
        is not masking_utils.and_masks(causal_mask_function).__code__
    ):
        return None
    parts = [part for cell in _cells(function) if isinstance(cell, tuple) for part in cell]
    if len(parts) != 2 or parts[1] is not causal_mask_function:
        return None
    overlay = masking_utils.sliding_window_overlay(1)
    numbers = _cells(parts[0])
    if (
        parts[0].__code__ is not overlay.__code__
        or len(numbers) != 1
        or not isinstance(numbers[0], int)
    ):
        return None
    return numbers[0]


def shape_of(padding: Tensor | None, batch: int, window: int) -> Shape:
    """The Shape of a mask. `padding`: bool [batch, tokens], True for tokens that are seen, or
    None."""
    if padding is None or bool(padding.all()):
        return Shape(window, (0,) * batch, False)
    seen = padding.to(torch.int8).cpu()
    hidden = torch.where(seen.any(1), seen.argmax(1), seen.shape[1])
    holes = bool((seen.sum(1) != seen.shape[1] - hidden).any())
    return Shape(window, tuple(hidden.tolist()), holes)


_WHOLE = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}  # never None


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
    """A mask: bool [batch, kv_length] with an attribute kvant, its Shape; or bool [batch, 1,
    q_length, kv_length] if a Shape cannot describe it."""
    window = window_of(mask_function)
    fits = attention_mask is None or attention_mask.shape[1] == kv_length
    if (
        window is None
        or not fits
        or kv_offset != 0
        or not isinstance(q_offset, int)
        or q_offset + q_length != kv_length
    ):
        options |= _WHOLE
        return sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            **options,
        )
    if attention_mask is None:
        made = torch.ones((1, 1), dtype=torch.bool, device=options.get("device", "cpu")).expand(
            batch_size, kv_length
        )
    else:
        made = attention_mask.to(torch.bool).view(attention_mask.shape)
    seen = None if attention_mask is None else made
    made.kvant = shape_of(seen, batch_size, window)  # type: ignore[attr-defined]
    return made


# Models may ask a Mask for its shape, copy it, cut it and join it with other masks. Every other
# operator would use its booleans as numbers, mostly by adding them to scores.
_QUESTIONS = frozenset(
    "__get__ __len__ __repr__ __format__ __hash__ size dim ndimension numel nelement stride "
    "is_contiguous is_floating_point is_complex element_size get_device storage_offset "
    "data_ptr".split()
)
_COPIES = frozenset("to contiguous clone detach cpu cuda".split())
_LOGIC = frozenset(
    "__getitem__ __and__ __rand__ __or__ __ror__ __invert__ bitwise_and bitwise_or bitwise_not "
    "logical_and logical_or logical_not expand expand_as narrow cat".split()
)
_REFUSED = (
    'attn_implementation="kvant": this model computes attention itself ({}) instead of calling '
    "the implementation that was chosen: load it with "
    'attn_implementation="eager", with which a KvantCache works, too'
)


class Mask(Tensor):
    """A mask for kvant's attention only: bool [batch, 1, q_length, kv_length], True for tokens that
    are seen.

    Attention that is written into a model adds its mask to scores, where True would count as 1 and
    hide nothing. So every operator that is not about masks is a ValueError.

    `shape_`: the mask as a Shape; the booleans then describe only padding. None: the booleans are
    the whole mask. whole() makes the booleans of the whole mask."""

    shape_: Shape | None
    whole: Callable[[], Tensor]

    @staticmethod
    def of(made: Tensor, shape: Shape | None, whole: Callable[[], Tensor]) -> Mask:
        found = made.as_subclass(Mask)
        found.shape_, found.whole = shape, whole
        return found

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, first = getattr(function, "__name__", ""), args[0] if args else None
        about = isinstance(first, Mask)
        copies = (
            about
            and name in _COPIES
            and not any(isinstance(x, torch.dtype) for x in tree_leaves((args, kwargs)))
        )
        if not (about and name in _QUESTIONS or copies or name in _LOGIC):
            raise ValueError(_REFUSED.format(name))
        others = any(
            torch.is_tensor(x) and not isinstance(x, Mask) for x in tree_leaves((args, kwargs))
        )
        if name == "cat" and others:  # other tensors are numbers that the model made for adding
            raise ValueError(_REFUSED.format(name))
        if name in _LOGIC:
            args, kwargs = tree_map_only(Mask, lambda mask: mask.whole(), (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            made = function(*args, **(kwargs or {}))
        if name in _QUESTIONS and not torch.is_tensor(made):
            return made
        if not torch.is_tensor(made) or made.dtype != torch.bool or name in _QUESTIONS:
            raise ValueError(_REFUSED.format(name))
        return (
            Mask.of(made, first.shape_, first.whole)
            if copies
            else Mask.of(made, None, lambda: made)
        )


def plain(made: Tensor | None) -> tuple[Tensor | None, Shape | None]:
    """The mask as a plain tensor, and its Shape if it has one. For kvant's own attention."""
    if not isinstance(made, Mask):
        return made, None
    with torch._C.DisableTorchFunctionSubclass():
        found = made.as_subclass(Tensor)
        return (found if made.shape_ is None else found[:, 0, 0]), made.shape_


def _is_compiled() -> bool:
    """Whether torch.compile runs the model, in its graph or between two graphs. It cannot follow a
    Mask."""
    if torch.compiler.is_compiling():
        return True
    callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)()
    return callable(callback)


def _added(seen: Tensor) -> Tensor:
    """The mask as numbers that any attention may add to its scores: 0 for tokens that are seen."""
    return torch.zeros(seen.shape, dtype=torch.float32, device=seen.device).masked_fill(
        ~seen, torch.finfo(torch.float32).min
    )


def guarded(batch_size: int, q_length: int, *others: Any, **options: Any) -> Tensor:
    """mask as a Mask. Under torch.compile it is numbers, which attention that is written into a
    model can add, too."""
    if _is_compiled():
        return _added(sdpa_mask(batch_size, q_length, *others, **options | _WHOLE))
    made = mask(batch_size, q_length, *others, **options)
    shape = getattr(made, "kvant", None)
    if shape is None:
        return Mask.of(made, None, lambda: made)

    def whole() -> Tensor:
        return sdpa_mask(batch_size, q_length, *others, **options | _WHOLE)

    return Mask.of(made[:, None, None].expand(-1, 1, q_length, -1), shape, whole)


AttentionMaskInterface.register("kvant", guarded)
