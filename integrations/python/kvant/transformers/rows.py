"""Rows, a tensor that a cache's layer passes to attention. It knows its layer, and decodes the
layer's rows when any other code than kvant's attention reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Rows(Tensor):
    """The keys or the values of the first `length` tokens of a layer, [batch, kv heads, length,
    head_dim], which are made when an operator of PyTorch reads them."""

    layer: Any
    role: int
    length: int

    @staticmethod
    def __new__(cls, layer: Any, role: int, like: Tensor, length: int) -> Rows:
        shape = (*like.shape[:2], length, like.shape[3])
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        made.layer, made.role, made.length = layer, role, length
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def decoded(self) -> Tensor:
        return self.layer.decoded(self.length)[self.role]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Rows, Rows.decoded, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<kvant rows {'kv'[self.role]} {list(self.shape)} {self.dtype}>"
