"""A layer's pages in the memory that vLLM gave it on a CPU: all blocks of keys, then all blocks of values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import attention
from ..library import PAGE_TOKENS
from ..tensor import Tensor as Pages
from . import Stored
from .codecs import codecs


class LayerPages:
    def __init__(self, stored: Stored, memory: Tensor, layer: int, heads: range, head_dim: int) -> None:
        """memory: vLLM's tensor of the layer, its first dimension blocks."""
        if memory.shape[2] != PAGE_TOKENS:
            raise ValueError(f"kvant: --block-size {PAGE_TOKENS} is needed, not {memory.shape[2]}")
        n_threads = torch.get_num_threads()
        self.n_threads = n_threads
        whole, first = memory.view(torch.uint8).reshape(-1).numpy(), 0
        parts = []
        for role in ("k", "v"):
            made = codecs(stored, role, head_dim, layer, heads)
            bytes_ = memory.shape[0] * len(heads) * made[0].page_bytes
            parts.append(Pages(made, n_blocks=memory.shape[0], n_threads=n_threads, memory=whole[first : first + bytes_]))
            first += bytes_
        self.k, self.v = parts

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Rows [n, kv heads, head_dim]; slots below 0 are padding."""
        kept = slots >= 0
        numbers = slots[kept].to(torch.int64).numpy()
        for pages, rows in ((self.k, keys), (self.v, values)):
            pages.write(numbers, rows[kept].detach().to(torch.float32).contiguous().numpy())

    def attend(self, q: Tensor, out: Tensor, batch: Any, part: Any, options: Any) -> None:
        """Of the newest tokens of a part's sequences: rows of q and out, [n, heads, head_dim]."""
        named: dict[str, Any] = dict(scale=options.scale, window=options.window, causal=options.causal)
        named |= dict(logit_softcap=options.softcap or None, n_threads=self.n_threads)
        if options.sinks is not None:
            named["sinks"] = options.sinks.detach().to(torch.float32).numpy()
        starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        for i in range(part.first, part.last):
            rows = slice(starts[i], starts[i + 1])
            if rows.start < rows.stop:
                queries = q[rows].detach().to(torch.float32).contiguous().numpy()
                table = batch.block_table[i].to(torch.int32).contiguous().numpy()
                found = attention(self.k, self.v, queries, lengths[i], table, **named)
                out[rows] = torch.from_numpy(found).to(out.dtype)
