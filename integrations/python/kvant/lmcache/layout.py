"""The layouts of tensors in LMCache objects: keys and values of all layers for a chunk of
tokens."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Sequence

from ..library import PAGE_TOKENS

RAW, FUSED, SPLIT = 0, 1, 2
DTYPES = ("bfloat16", "float16", "float32")


def align(n: int, to: int = 64) -> int:
    return -(-n // to) * to


class Layout(NamedTuple):
    """One tensor. FUSED: [1, layers, tokens, kv heads x (K | V) x head_dim], vLLM's since 0.26.
    SPLIT: [2, layers, tokens, kv heads x head_dim]. RAW: any other layout, whose bytes are kept
    unchanged."""

    kind: int
    dtype: str
    shape: tuple[int, ...]
    item: int  #: bytes of a number
    n_kv_heads: int = 0
    head_dim: int = 0

    @property
    def n_layers(self) -> int:
        return self.shape[1] if self.kind else 0

    @property
    def n_tokens(self) -> int:
        return self.shape[2] if self.kind else 0

    @property
    def n_blocks(self) -> int:
        """Blocks of one layer."""
        return -(-self.n_tokens // PAGE_TOKENS)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.item

    @property
    def row(self) -> int:
        """Numbers from one token to the next token."""
        return self.shape[3]

    @property
    def head_stride(self) -> int:
        """Numbers from one kv head to the next kv head."""
        return self.head_dim * (2 if self.kind == FUSED else 1)

    def role_offset(self, role: int, n_tokens: int) -> int:
        """The offset of a role's first number in [1 or 2, n_tokens, row]."""
        return role * (self.head_dim if self.kind == FUSED else n_tokens * self.row)


def layout(shape: Sequence[int], dtype: Any, head_dim: int) -> Layout:
    """The layout of a tensor of this shape. `dtype`: torch's."""
    shape, name = tuple(map(int, shape)), str(dtype).removeprefix("torch.")
    if name in DTYPES and len(shape) == 4 and shape[0] in (1, 2) and 0 not in shape:
        kind = FUSED if shape[0] == 1 else SPLIT
        heads, rest = divmod(shape[3], head_dim * (2 if kind == FUSED else 1))
        if heads and not rest:
            return Layout(kind, name, shape, dtype.itemsize, heads, head_dim)
    return Layout(RAW, name, shape, dtype.itemsize)
