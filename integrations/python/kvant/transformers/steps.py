"""Decode steps of a Store that a CUDA graph replays. Their rows are in tensors of fixed addresses.
They are appended to the cache when a block is full or when other code needs the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import torch as operators
from ..library import PAGE_TOKENS, Error

if TYPE_CHECKING:
    from .store import Store

_NOT_HERE = 30, 60  # unsupported; full: a call without a graph then reports the error
FEW = 4  # a round with no more steps than this is not worth beginning


class Steps:
    """`left`: steps until begin is needed again. `taken`: steps of this round. `graph`: a number
    that captured steps depend on. `running`: the model's calls are a step. `short`: consecutive
    rounds that ended early."""

    def __init__(self) -> None:
        self.left = self.taken = self.graph = self.short = 0
        self.floats = self.running = False
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}
        self.place: Tensor | None = None

    def ready(self, store: Store) -> bool:
        """Whether a step may follow. It begins a round if one has ended."""
        if self.left > self.taken:
            return True
        self.settle(store)
        cache = store.cache
        if cache is None or cache.device == "cpu" or self.short > 2 or not store.sequences:
            return False
        if not store.keeps_past:
            store.drop()
        try:
            self.left, self.graph, self.floats = cache.begin_steps(store.sequences.numbers)
        except Error as error:
            if error.status not in _NOT_HERE:
                raise
            return False
        return True

    def next(self, store: Store) -> None:
        assert store.cache is not None
        store.cache.next_step()
        if self.place is not None:
            self.place.fill_(self.taken)
        self.taken += 1

    def _keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        if (
            layer not in self.rows
            or self.rows[layer][0].shape[0] != k.shape[0]
            or self.rows[layer][0].dtype != k.dtype
        ):
            with torch.inference_mode(False):
                self.place = torch.full((1,), self.taken - 1, device=k.device)
                self.rows[layer] = tuple(  # type: ignore[assignment]
                    x.new_zeros((x.shape[0], PAGE_TOKENS, *x.shape[1::2]))
                    for x in (k.detach(), v.detach())
                )
        assert self.place is not None
        for kept, x in zip(self.rows[layer], (k, v)):
            kept.index_copy_(1, self.place, x.detach().transpose(1, 2))

    def attend(
        self,
        store: Store,
        layer: int,
        q: Tensor,
        rows: tuple[Tensor, Tensor] | None,
        window: int,
        how: dict[str, Any],
    ) -> Tensor:
        """Attention of one step, [batch, 1, heads, head_dim]; q and rows have one token. `how`:
        scale, softcap and sinks."""
        if rows is None or q.shape[2] != 1 or rows[0].shape[2] != 1:
            raise RuntimeError(
                "kvant's attention was called twice, or for more than one token, in a step: use "
                "the model without kvant.transformers.graphs"
            )
        self._keep(layer, *rows)
        dtype = torch.float32 if self.floats or how["sinks"] is not None else q.dtype
        k, v = (x.to(dtype)[:, :, 0] for x in rows)
        call = torch.ops.kvant.cache_step
        out = call(
            store._state,
            q.to(dtype)[:, :, 0],
            k,
            v,
            store._number,
            store.places[layer],
            window=window,
            **how,
        )
        return out.to(q.dtype)[:, None]

    def forget(self) -> None:
        """Ends this round without its rows."""
        self.left = self.taken = 0

    def settle(self, store: Store) -> None:
        """Appends the rows of this round and ends it."""
        n, full = self.taken, self.taken == self.left
        self.forget()
        if not n:
            return
        self.short = 0 if full or n > FEW else self.short + 1
        for layer in store.lengths:
            k, v = (x[:, :n].transpose(1, 2) for x in self.rows[layer])
            store.append(layer, k, v, None)


def steps_of(cache: Any) -> list[tuple[Store, Steps]] | None:
    """The steps of all stores of a KvantCache, when a step may follow."""
    stores = list(cache._stores.values())
    if not stores or cache._others():
        return None
    for store in stores:
        if store.steps is None:
            store.steps = Steps()
    found = [(store, store.steps) for store in stores]
    return found if all(steps.ready(store) for store, steps in found) else None
