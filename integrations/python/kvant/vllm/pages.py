"""A layer's pages in the memory that vLLM gave it: all blocks of keys, then all blocks of values."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import attention
from ..calibration import Calibration
from ..codec import Codec
from ..library import PAGE_TOKENS
from ..tensor import Tensor as Pages
from . import Stored


@functools.lru_cache(maxsize=1)
def _calibration(path: str | None) -> Calibration | None:
    return None if path is None else Calibration(path)


def _codec(stored: Stored, role: str, head_dim: int, layer: int, kv_head: int) -> Codec:
    return Codec(getattr(stored, role), head_dim, role, _calibration(stored.calibration), layer, kv_head)


def cell_bytes(stored: Stored, head_dim: int) -> int:
    """Bytes of a token and kv head, keys and values. ValueError for codecs whose rows are not in their pages alone."""
    total = 0
    for role in ("k", "v"):
        codec = _codec(stored, role, head_dim, 0, 0)
        with_state = Pages([codec]).info.bytes != codec.page_bytes
        if with_state or codec.page_bytes % PAGE_TOKENS:
            spec = getattr(stored, role)
            raise ValueError(f"KVANT_VLLM: {spec} keeps rows beside its pages, which vLLM's blocks have no room for")
        total += codec.page_bytes // PAGE_TOKENS
    return total


class LayerPages:
    def __init__(self, stored: Stored, memory: Tensor, layer: int, n_kv_heads: int, head_dim: int) -> None:
        """memory: vLLM's tensor of the layer, its first dimension blocks."""
        if memory.shape[2] != PAGE_TOKENS:
            raise ValueError(f"kvant: --block-size {PAGE_TOKENS} is needed, not {memory.shape[2]}")
        n_threads = torch.get_num_threads()
        self.memory, self.n_threads = memory, n_threads
        whole, first = memory.view(torch.uint8).reshape(-1).numpy(), 0
        parts = []
        for role in ("k", "v"):
            codecs = [_codec(stored, role, head_dim, layer, head) for head in range(n_kv_heads)]
            bytes_ = memory.shape[0] * n_kv_heads * codecs[0].page_bytes
            parts.append(Pages(codecs, n_blocks=memory.shape[0], n_threads=n_threads, memory=whole[first : first + bytes_]))
            first += bytes_
        self.k, self.v = parts

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Rows [n, kv heads, head_dim]; slots below 0 are padding."""
        kept = slots >= 0
        numbers = slots[kept].to(torch.int64).numpy()
        for pages, rows in ((self.k, keys), (self.v, values)):
            pages.write(numbers, rows[kept].detach().to(torch.float32).contiguous().numpy())

    def attend(self, queries: Tensor, n_tokens: int, blocks: Tensor, **options: Any) -> Tensor:
        """Of one sequence's newest tokens, [n, heads, head_dim]."""
        q = queries.detach().to(torch.float32).contiguous().numpy()
        table = blocks.to(torch.int32).contiguous().numpy()
        return torch.from_numpy(attention(self.k, self.v, q, n_tokens, table, n_threads=self.n_threads, **options))
