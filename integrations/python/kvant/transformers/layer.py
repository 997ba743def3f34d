"""KvantLayer: one layer of a KvantCache, which transformers calls with new rows and kvant's
attention with queries.

Rows are stored by a Store (store.py). Functions that act on all layers at once are KvantCache's."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from .masks import Shape
from .rows import Rows
from .store import Store

if TYPE_CHECKING:
    from .cache import KvantCache

# Query tokens of one call. A GPU takes 32767 at most, and a call's workspace grows with them.
PASS = 8192


class KvantLayer(CacheLayerMixin):
    """One layer of a KvantCache. update keeps the new rows until attention says which of them are
    padding. Other code that reads the tensors that update returns gets decoded rows."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: KvantCache, number: int, window: int) -> None:
        super().__init__()
        # Weak, so that a cache that nobody uses any more frees its memory at once.
        self.owner = weakref.proxy(owner)
        self.number, self.window = number, window
        self.is_sliding = window > 0
        if self.is_sliding:
            self.sliding_window = window
        self.store: Store | None = None
        self.pending: tuple[Tensor, Tensor] | None = None
        self.like: tuple[Tensor, Tensor] | tuple[()] = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.store = self.owner._store_of(self, key_states, value_states)
        self.store.lengths.setdefault(self.number, 0)
        # New tensors, because views would keep the memory of the first rows.
        self.like = tuple(
            x.new_empty((*x.shape[:2], 0, x.shape[3]))
            for x in (key_states.detach(), value_states.detach())
        )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError(
                "a compressed cache has no gradient: call the model under torch.no_grad()"
            )
        self.owner.check_weights()
        self.owner.begin_pass(self, key_states.shape[2])
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._flush(None)
        assert self.store is not None
        if self.store.steps and self.store.steps.running:
            self.pending = key_states, value_states
            length = self.get_seq_length()
            return Rows(self, 0, key_states, length), Rows(self, 1, value_states, length)
        if self.number == next(iter(self.store.lengths)) and not self.store.keeps_past:
            self.store.drop()
        self.store.begin(key_states, value_states, self.owner._make)
        self.pending = key_states, value_states
        length = self.get_seq_length()
        if self.owner.wants_tensors:
            return self.decoded(length)
        return Rows(self, 0, key_states, length), Rows(self, 1, value_states, length)

    def _flush(self, hidden: tuple[int, ...] | None, query: Tensor | None = None) -> None:
        if self.pending is not None:
            assert self.store is not None
            (k, v), self.pending = self.pending, None
            self.store.append(self.number, k, v, hidden, query)

    def attend(
        self,
        query: Tensor,
        mask: Tensor | None,
        shape: Shape | None,
        length: int,
        causal: bool,
        how: dict[str, Any],
    ) -> Tensor:
        """Attention of the newest tokens: [batch, n, heads, head_dim of values]. `how`: scale,
        softcap and sinks."""
        if length != self.get_seq_length():
            raise RuntimeError("kvant's attention was given keys of an earlier state of the cache")
        assert self.store is not None
        if self.store.steps and self.store.steps.running:
            rows, self.pending = self.pending, None
            window = self.window if shape is None else shape.window
            return self.store.steps.attend(self.store, self.number, query, rows, window, how)
        how = how | dict(exact=self.owner.exact, v_head_dim=self.like[1].shape[3])
        if (
            shape is None
            or shape.holes
            or not causal
            or self.pending is None
            or query.shape[2] <= PASS
        ):
            self._flush(None if shape is None else shape.hidden, query)
            return self.store.attend(self.number, query, mask, shape, causal, how)
        return self._attend_in_parts(query, shape, how)

    def _attend_in_parts(self, query: Tensor, shape: Shape, how: dict[str, Any]) -> Tensor:
        """Computes a long prompt in passes of PASS tokens: appends rows with their queries, then
        computes attention."""
        assert self.store is not None and self.pending is not None
        (k, v), self.pending, found = self.pending, None, []
        for q, k, v in zip(*(x.split(PASS, 2) for x in (query, k, v))):
            self.store.append(self.number, k, v, shape.hidden, q)
            here = shape._replace(
                hidden=tuple(min(n, self.store.lengths[self.number]) for n in shape.hidden)
            )
            found.append(self.store.attend(self.number, q, None, here, True, how))
        return torch.cat(found, 1)

    def decoded(self, length: int) -> tuple[Tensor, Tensor]:
        self._flush(None)
        assert self.store is not None
        return self.store.read(self.number, length, self.like)

    def _rows(self, role: int) -> Tensor | None:
        return (
            self.decoded(self.get_seq_length())[role]
            if self.is_initialized and self.get_seq_length()
            else None
        )

    def _set(self, rows: Tensor | None) -> None:
        if rows is not None:  # CacheLayerMixin's __init__ sets None
            raise AttributeError(
                "a KvantCache's keys and values can be read, not assigned: crop, reorder_cache "
                "and batch_select_indices "
                "take tokens and sequences away; to evict others use DynamicCache"
            )

    # Decoded again at each access, [batch, kv heads, tokens, head_dim]; None before the first
    # tokens.
    keys = property(lambda self: self._rows(0), _set)  # type: ignore[assignment]
    values = property(lambda self: self._rows(1), _set)  # type: ignore[assignment]

    def offload(self) -> None:
        raise RuntimeError(
            "a KvantCache is not offloaded: its pages stay where the model's keys are (save "
            "writes a file)"
        )

    prefetch = offload

    def get_seq_length(self) -> int:
        waiting = 0 if self.pending is None else self.pending[0].shape[2]
        return waiting + (0 if self.store is None else self.store.length(self.number))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.window or -1

    @property
    def batch_size(self) -> int:
        return self.store.batch or -1 if self.store is not None else -1

    def reset(self) -> None:
        """Does nothing by itself: KvantCache.reset forgets the rows of all layers at once."""
        self.pending = None


def window_of(layer: Any) -> int | None:
    """The window of a layer that a compressed layer can replace; None for layers that stay as the
    model has them."""
    if type(layer) is DynamicLayer:
        return 0
    return int(layer.sliding_window) if type(layer) is DynamicSlidingWindowLayer else None
