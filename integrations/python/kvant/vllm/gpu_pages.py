"""A layer's pages in the memory that vLLM gave it on a GPU: per block and kv head the page of keys, then of values."""

from __future__ import annotations

import ctypes as c
from typing import Any, Sequence

import numpy as np
import torch
from torch import Tensor

from .. import structs as s
from ..codec import Codec
from ..library import PAGE_TOKENS, check, library, text_buffer
from ..paged import _GpuCodec
from . import Stored
from .codecs import codecs

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # kvant_cuda_type
_SCRATCH_BYTES = 129 << 20  # KVANT_CUDA_SCRATCH_BYTES
_workspaces: dict[tuple[str, int], Tensor] = {}  # by GPU and head_dim: vLLM's attention runs on one stream


def workspace(head_dim: int, device: torch.device) -> Tensor:
    key = str(device), head_dim
    if key not in _workspaces:
        size = library().kvant_cuda_attention_workspace(head_dim)
        if size == 0:
            text = text_buffer()
            check("GPU", library().kvant_cuda_available(text, len(text)), text)
            raise RuntimeError("kvant: libkvant_cuda has no code for this GPU")
        _workspaces[key] = torch.zeros(size + _SCRATCH_BYTES, dtype=torch.uint8, device=device)
    return _workspaces[key]


def _call(name: str, arguments: Any, device: torch.device) -> None:
    """On the stream that is current on the current GPU."""
    stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else None
    check(name, getattr(library(), f"kvant_cuda_{name}")(c.byref(arguments), stream))


def _floats(address: int, n: int) -> np.ndarray:
    return np.ctypeslib.as_array((c.c_float * n).from_address(address))


class Numbers:
    """What a calibration gives the codecs of a role's kv heads, on the GPU; None: nothing."""

    def __init__(self, made: Sequence[Codec], device: torch.device) -> None:
        self.head_dim, self.device, self.tables = made[0].head_dim, device, [self._tables(codec) for codec in made]
        first = self.tables[0]
        self.n_weights = first.n_weights
        self.center, self.scale = self._gather("center", self.head_dim), self._gather("scale", self.head_dim)
        self.weights, self.inverse = (self._gather(name, first.n_weights) for name in ("weights", "inverse_weights"))
        self.centroids = self._gather("centroids", first.n_centroids)
        pivots, columns = self._gather("pivots", self.head_dim), self._gather("columns", self.head_dim**2)
        self.feedback = None if pivots is None else torch.cat([pivots, columns], 1).contiguous()
        self.has_matrix = first.n_weights > self.head_dim
        diagonal = None if self.has_matrix else self.inverse
        parts = [x for x in (self.scale, diagonal) if x is not None]
        self.attention_scale = parts[0] * parts[1] if len(parts) == 2 else parts[0] if parts else None

    @staticmethod
    def _tables(codec: Codec) -> Any:
        tables = s.CudaTables.new()
        check("codec tables", library().kvant_cuda_codec_tables(codec.handle, c.byref(tables)))
        return tables

    def _gather(self, name: str, n: int) -> Tensor | None:
        """[kv heads, n]."""
        addresses = [getattr(tables, name) for tables in self.tables]
        if not n or not addresses[0]:
            return None
        return torch.from_numpy(np.stack([_floats(address, n) for address in addresses])).to(self.device)


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Role:
    def __init__(self, made: Sequence[Codec], base: int, block_stride: int, head_stride: int, device: Any) -> None:
        self.codec, self.numbers, self.codecs = _GpuCodec.of(made[0]), Numbers(made, device), made
        self.pages = s.CudaPages(base, block_stride, head_stride)

    def rows(self, rows: Tensor) -> Any:
        """The structure of an append of rows [n, kv heads, head_dim], each contiguous."""
        numbers = self.numbers
        return s.CudaRows(
            codec=self.codec.handle,
            pages=self.pages,
            rows=rows.data_ptr(),
            token_stride=rows.stride(0),
            head_stride=rows.stride(1),
            center=pointer(numbers.center),
            scale=pointer(numbers.scale),
            weights=pointer(numbers.weights),
        )


class LayerPages:
    def __init__(self, stored: Stored, memory: Tensor, layer: int, heads: range, head_dim: int) -> None:
        """memory: vLLM's tensor [blocks, kv heads, tokens, content], of any type."""
        made = [codecs(stored, role, head_dim, layer, heads) for role in "kv"]
        head_bytes = sum(codec[0].page_bytes for codec in made)
        block, head, token, _ = (stride * memory.element_size() for stride in memory.stride())
        head = head_bytes if len(heads) == 1 else head
        if memory.shape[2] != PAGE_TOKENS or token * PAGE_TOKENS != head_bytes or head != head_bytes:
            raise ValueError(f"kvant: --block-size {PAGE_TOKENS} and the layout LBHNC are needed, not {memory.shape[2]}")
        if memory.data_ptr() % 16 or block % 16:
            raise ValueError("kvant: vLLM's blocks are not aligned to 16 bytes")
        self.device, self.n_kv_heads, self.head_dim = memory.device, len(heads), head_dim  # vLLM frees its memory
        base = memory.data_ptr()
        places = (base, base + made[0][0].page_bytes)
        self.k, self.v = (Role(part, at, block, head, memory.device) for part, at in zip(made, places))
        text = text_buffer()
        check("codecs", library().kvant_cuda_attention_check(self.k.codec.handle, self.v.codec.handle, text, len(text)), text)

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Rows [n, kv heads, head_dim]; slots below 0 are padding."""
        if len(slots) == 0:
            return
        keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values))
        arguments = s.CudaAppendArgs.new(
            k=self.k.rows(keys),
            v=self.v.rows(values),
            type=_TYPES[keys.dtype],
            n_tokens=len(slots),
            n_kv_heads=self.n_kv_heads,
            slots=slots.data_ptr(),
            k_feedback=pointer(self.k.numbers.feedback),
            centroids=(c.c_void_p * 2)(pointer(self.k.numbers.centroids), pointer(self.v.numbers.centroids)),
        )
        _call("append", arguments, self.device)

    def _turned(self, q: Tensor, part: Any) -> Tensor:
        """Queries of a part through the matrix of transform=file, float32, in the rows that they have in q."""
        turned, rows = torch.empty(q.shape, dtype=torch.float32, device=q.device), slice(part.first_row, part.last_row)
        arguments = s.CudaQueryArgs.new(
            k_codec=self.k.codec.handle,
            batch=part.last_row - part.first_row,
            n_heads=q.shape[1],
            n_kv_heads=self.n_kv_heads,
            type=_TYPES[q.dtype],
            q=q[rows].data_ptr(),
            q_batch_stride=q.stride(0),
            q_head_stride=q.stride(1),
            inverse_weights=pointer(self.k.numbers.inverse),
            out=turned[rows].data_ptr(),
        )
        _call("transform_queries", arguments, self.device)
        return turned

    def attend(self, q: Tensor, out: Tensor, batch: Any, part: Any, options: Any) -> None:
        """Of the newest tokens of a part's sequences: rows of q and out, [n, heads, head_dim]."""
        if part.first_row == part.last_row:
            return
        k, v, target = self.k.numbers, self.v.numbers, out
        if k.has_matrix:
            q, target = self._turned(q, part), torch.empty(out.shape, dtype=torch.float32, device=out.device)
        sinks = None if options.sinks is None else options.sinks.detach().to(self.device, torch.float32).contiguous()
        room, table = workspace(self.head_dim, self.device), batch.block_table
        n_blocks = -(-part.most_tokens // PAGE_TOKENS) or table.shape[1]  # few: more heads fit into the workspace
        arguments = s.CudaAttentionArgs.new(
            k_codec=self.k.codec.handle,
            v_codec=self.v.codec.handle,
            k=self.k.pages,
            v=self.v.pages,
            block_table=table[part.first].data_ptr(),
            table_stride=table.stride(0),
            blocks_per_row=n_blocks,
            lengths=batch.seq_lens[part.first :].data_ptr(),
            batch=part.last - part.first,
            n_heads=q.shape[1],
            n_kv_heads=self.n_kv_heads,
            type=_TYPES[q.dtype],
            q=q.data_ptr(),
            q_head_stride=q.stride(1),
            out=target.data_ptr(),
            out_head_stride=target.stride(1),
            scale=options.scale,
            v_center=pointer(v.center),
            k_scale=pointer(k.attention_scale),
            v_scale=pointer(v.attention_scale),
            workspace=room.data_ptr(),
            workspace_bytes=room.numel(),
            query_tokens=part.most_queries,
            query_starts=batch.query_start_loc[part.first :].data_ptr(),
            q_token_stride=q.stride(0),
            out_token_stride=target.stride(0),
            causal=options.causal,
            window=options.window,
            logit_softcap=options.softcap,
            sinks=pointer(sinks),
            centroids=(c.c_void_p * 2)(pointer(k.centroids), pointer(v.centroids)),
        )
        _call("attention", arguments, self.device)
        if target is not out:
            rows = slice(part.first_row, part.last_row)
            out[rows] = target[rows].to(out.dtype)
