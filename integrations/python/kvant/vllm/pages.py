"""A layer's pages in the memory that vLLM assigned on a CPU: for each block the pages of all kv
heads' keys, then of their values.

vLLM shares memory block by block between layers of different kinds (windows, recurrent states), so
a layer may only write to bytes of its blocks. Rows that hold a NaN or an infinity are refused:
attention to their slots returns NaN, as with vLLM's own cache."""

from __future__ import annotations

import logging
from typing import Any, Iterator

import torch
from torch import Tensor

from .. import attention
from ..arrays import np
from ..library import PAGE_TOKENS, Error
from ..tensor import Tensor as Pages
from . import Stored, is_calibrated
from .codecs import codecs

LOG = logging.getLogger("vllm.kvant")
_REFUSED = (50, 51)  # KVANT_ERR_NONFINITE, KVANT_ERR_RANGE


def rows_of_blocks(memory: Tensor) -> np.ndarray:
    """vLLM's tensor [blocks, kv heads, tokens, content] as uint8 [blocks of 64 tokens, bytes], at
    the same addresses. ValueError if a view is not possible: a copy would exceed vLLM's memory
    budget."""
    n_blocks, n_heads, n_tokens, content = memory.shape
    block, head, token, channel = (stride * memory.element_size() for stride in memory.stride())
    if n_tokens % PAGE_TOKENS:
        raise ValueError(
            f"kvant: --block-size has to be a multiple of {PAGE_TOKENS}, not {n_tokens}"
        )
    dense = (
        channel == memory.element_size()
        and token == content * channel
        and (head == n_tokens * token or n_heads == 1)
    )
    parts, bytes_ = n_tokens // PAGE_TOKENS, n_heads * n_tokens * token
    if not dense or block % (parts * 64) or (parts > 1 and block != bytes_):
        raise ValueError(
            f"kvant: the layout LBHNC is needed, not {tuple(memory.shape)}, {memory.stride()} apart"
        )
    flat = (
        torch.as_strided(memory, (n_blocks, bytes_ // channel), (memory.stride(0), 1))
        .view(torch.uint8)
        .numpy()
    )
    rows = flat if parts == 1 else flat.reshape(n_blocks * parts, bytes_ // parts)
    if rows.ctypes.data != memory.data_ptr():
        raise ValueError("kvant: vLLM copied the memory of a layer, so its pages cannot be found")
    return rows


class LayerPages:
    def __init__(
        self, stored: Stored, memory: Tensor, layer: int, heads: range, head_dim: int
    ) -> None:
        """memory: vLLM's tensor of the layer."""
        self.n_threads = torch.get_num_threads()
        self.blocks, self.layer = rows_of_blocks(memory), layer
        self.parts = memory.shape[2] // PAGE_TOKENS  # of one of vLLM's blocks
        self.refused: set[int] = set()  # slots
        self.used = np.zeros(len(self.blocks), bool)  # whether anything was ever written
        self._made_of = stored, head_dim, layer, heads
        self.k, self.v = self._make()

    def _make(self) -> list[Pages]:
        made, first, (stored, *rest) = [], 0, self._made_of
        for role in ("k", "v"):
            of_role = codecs(stored, role, *rest)
            end = first + sum(codec.page_bytes for codec in of_role)
            if end > self.blocks.shape[1]:
                size = self.blocks.shape[1]
                raise ValueError(f"kvant: blocks of {size} bytes are too small for pages of {end}")
            made.append(
                Pages(
                    of_role,
                    n_blocks=len(self.blocks),
                    n_threads=self.n_threads,
                    memory=self.blocks[:, first:end],
                )
            )
            first = end
        return made

    def relearn(self, memory: Tensor) -> None:
        """Encodes all rows again, with the transforms that the preset has learned."""
        used, fresh = np.flatnonzero(self.used).tolist(), self._make()
        for i, name in enumerate("kv"):
            if is_calibrated(getattr(self._made_of[0], name)):
                old = getattr(self, name)
                rows = [old.read(PAGE_TOKENS * block, PAGE_TOKENS) for block in used]
                for block, of_block in zip(used, rows):
                    fresh[i].write(PAGE_TOKENS * block + np.arange(PAGE_TOKENS), of_block)
                setattr(self, name, fresh[i])

    def write_apart(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Writes rows that no step has planned."""
        self.write(keys, values, slots)

    def forget(self) -> None:
        """There are no exact blocks on a CPU."""

    def write(
        self,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        queries: Tensor | None = None,
        exact: Any = None,
    ) -> None:
        """Writes rows [n, kv heads, head_dim]; slots below 0 are padding. A write to a block's
        first slot clears the block, because other layers and sequences have left numbers there,
        which may be NaNs. Attention on CPUs transforms the queries itself."""
        kept = slots >= 0
        numbers = slots[kept].to(torch.int64).numpy()
        self.blocks[numbers[numbers % PAGE_TOKENS == 0] // PAGE_TOKENS] = 0
        self.used[numbers // PAGE_TOKENS] = True
        if self.refused:
            self.refused.difference_update(numbers.tolist())
        for pages, rows in ((self.k, keys), (self.v, values)):
            self._write(pages, numbers, rows[kept].detach().to(torch.float32).contiguous().numpy())

    def _write(self, pages: Pages, slots: np.ndarray, rows: np.ndarray) -> None:
        """Writes rows. The library writes all rows or none, so one request's NaN would end a batch.
        Halving the batch finds the refused rows."""
        try:
            pages.write(slots, rows)
            return
        except Error as error:
            if error.status not in _REFUSED:
                raise
            if len(slots) == 1:
                if not self.refused:
                    LOG.warning(
                        "kvant: a row of layer %d is refused, its request's output is NaN: %s",
                        self.layer,
                        error,
                    )
                self.refused.add(int(slots[0]))
                return
        half = len(slots) // 2
        self._write(pages, slots[:half], rows[:half])
        self._write(pages, slots[half:], rows[half:])

    def _blind(
        self, table: np.ndarray, length: int, n: int, window: int, causal: bool
    ) -> Iterator[slice]:
        """Yields the newest n tokens of a sequence that see a refused slot."""
        first, used = length - n, table[: -(-length // PAGE_TOKENS)]
        for slot in self.refused:
            for index in np.flatnonzero(used == slot // PAGE_TOKENS).tolist():
                token = PAGE_TOKENS * index + slot % PAGE_TOKENS
                if token < length:
                    end = min(token + window, length) if window else length
                    yield slice(max(0, token - first) if causal else 0, max(0, end - first))

    def _tables(self, batch: Any) -> np.ndarray:
        """Blocks of 64 tokens per sequence; a block of vLLM has several of them."""
        tables = batch.block_table.to(torch.int32)[:, :, None] * self.parts
        return (
            (tables + torch.arange(self.parts, dtype=torch.int32, device="cpu")).flatten(1).numpy()
        )

    def attend(
        self,
        q: Tensor,
        out: Tensor,
        batch: Any,
        part: Any,
        options: Any,
        rotated: Tensor | None = None,
    ) -> None:
        """Attention of the newest tokens of a part's sequences: rows of q and out, [n, heads,
        head_dim]."""
        named: dict[str, Any] = dict(
            scale=options.scale, window=options.window, causal=options.causal
        )
        named |= dict(logit_softcap=options.softcap or None, n_threads=self.n_threads)
        if options.sinks is not None:
            named["sinks"] = options.sinks.detach().to(torch.float32).numpy()
        starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        tables = self._tables(batch)
        for i in range(part.first, part.last):
            rows = slice(starts[i], starts[i + 1])
            if rows.start < rows.stop:
                queries = q[rows].detach().to(torch.float32).contiguous().numpy()
                found = attention(self.k, self.v, queries, lengths[i], tables[i], **named)
                seen = (tables[i], lengths[i], len(found), options.window, options.causal)
                for blind in self._blind(*seen):
                    found[blind] = np.nan
                out[rows] = torch.from_numpy(found).to(out.dtype)
