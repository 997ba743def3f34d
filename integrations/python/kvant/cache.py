"""A pool of compressed pages and the calls that work on it."""

import ctypes as c
import math

import torch

from .codec import Codec
from .library import (
    AppendArgs,
    AttentionArgs,
    DecodeArgs,
    PAGE_TOKENS,
    Pages,
    Rows,
    SealArgs,
    SealPages,
    check,
    library,
)

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def _type(tensor):
    if tensor.dtype not in _TYPES:
        raise TypeError(f"{tensor.dtype}: kvant takes float32, float16 and bfloat16")
    return _TYPES[tensor.dtype]


def _rows(tensor, shape, what):
    """Checks a [n, heads, head_dim] tensor on the GPU whose rows are contiguous."""
    if not tensor.is_cuda or tensor.dim() != 3 or tensor.shape[1:] != shape or tensor.stride(2) != 1:
        raise ValueError(
            f"{what}: a CUDA tensor [n, {shape[0]}, {shape[1]}] with contiguous rows is needed, "
            f"not {tuple(tensor.shape)} on {tensor.device}"
        )
    return tensor


def _ints(tensor, dtype, what):
    if not tensor.is_cuda or tensor.dtype != dtype or tensor.stride(-1) != 1:
        raise ValueError(f"{what}: a contiguous CUDA tensor of {dtype} is needed")
    return tensor


def _pointer(tensor):
    return None if tensor is None else tensor.data_ptr()


def _stream():
    return torch.cuda.current_stream().cuda_stream


class PagedCache:
    """n_blocks sealed blocks of 64 tokens and n_open_blocks open (fp16) ones; a block holds the K and V pages of all kv
    heads. Memory is two tensors, `pool` and `open_pool`. Block tables name sealed block b by b, open block b by -1 - b."""

    def __init__(
        self, k_spec, v_spec, n_kv_heads, head_dim, n_blocks, n_open_blocks=0, seed=0, device="cuda"
    ):
        self.k, self.v = Codec(k_spec, head_dim, "k", seed), Codec(v_spec, head_dim, "v", seed)
        text = c.create_string_buffer(512)
        status = library().kvant_cuda_attention_check(self.k.handle, self.v.handle, text, len(text))
        check(f"keys {k_spec!r} with values {v_spec!r}", status, text.value.decode())
        self.n_kv_heads, self.head_dim, self.n_blocks = n_kv_heads, head_dim, n_blocks
        self._v_offset = self.k.info.page_bytes * n_kv_heads
        self.block_bytes = self._v_offset + self.v.info.page_bytes * n_kv_heads
        self.pool = torch.zeros(n_blocks * self.block_bytes, dtype=torch.uint8, device=device)
        self.open_k, self.open_v = self.k.open(), self.v.open()
        self.n_open_blocks = n_open_blocks
        self._open_bytes = self.open_k.info.page_bytes
        self.open_pool = torch.zeros(
            2 * n_open_blocks * n_kv_heads * self._open_bytes, dtype=torch.uint8, device=device
        )
        size = library().kvant_cuda_attention_workspace(head_dim)
        self._workspace = torch.zeros(max(size, 1), dtype=torch.uint8, device=device)

    def _pages(self, role):
        if role == "k":
            return Pages(self.pool.data_ptr(), self.block_bytes, self.k.info.page_bytes)
        return Pages(self.pool.data_ptr() + self._v_offset, self.block_bytes, self.v.info.page_bytes)

    def _open_pages(self, role):
        if self.n_open_blocks == 0:
            return Pages()
        half = self.n_kv_heads * self._open_bytes
        return Pages(self.open_pool.data_ptr() + (half if role == "v" else 0), 2 * half, self._open_bytes)

    def append(
        self,
        k,
        v,
        slots,
        k_center=None,
        v_center=None,
        k_factors=None,
        v_factors=None,
        refused=None,
        to_open=False,
    ):
        """Writes tokens: k, v [n, kv heads, head_dim] of one dtype, slots int64 (64 * block + offset, negative skips).
        Centres and factors are float32 [kv heads, head_dim]: rows are shifted by the one, then divided by the other.
        to_open: into open blocks, the only way for codecs with groups of 32. refused: an int32 CUDA tensor of one number
        that collects the reasons of rows that were not written."""
        args = AppendArgs(
            size=c.sizeof(AppendArgs),
            type=_type(k),
            n_tokens=k.shape[0],
            n_kv_heads=self.n_kv_heads,
            slots=_ints(slots, torch.int64, "slots").data_ptr(),
            refused=_pointer(refused),
        )
        codecs = (self.open_k, self.open_v) if to_open else (self.k, self.v)
        pages = self._open_pages if to_open else self._pages
        for name, codec, rows, center, factors in (
            ("k", codecs[0], k, k_center, k_factors),
            ("v", codecs[1], v, v_center, v_factors),
        ):
            rows = _rows(rows, (self.n_kv_heads, self.head_dim), name)
            if rows.dtype != k.dtype or rows.shape[0] != slots.shape[0]:
                raise ValueError("k, v and slots do not belong together")
            setattr(
                args,
                name,
                Rows(
                    codec.handle,
                    pages(name),
                    rows.data_ptr(),
                    rows.stride(0),
                    rows.stride(1),
                    _pointer(center),
                    _pointer(factors),
                ),
            )
        check("append", library().kvant_cuda_append(c.byref(args), _stream()))

    def seal(self, open_blocks, blocks, tokens=None, refused=None):
        """Quantises open blocks into sealed ones: int32 numbers, negative ones skip. tokens: int32, how many of each open
        block were written, or None for all 64."""
        numbers = [_ints(t, torch.int32, "blocks") for t in (open_blocks, blocks)]
        if numbers[0].shape != numbers[1].shape or (tokens is not None and tokens.shape != numbers[0].shape):
            raise ValueError("open blocks, blocks and tokens do not belong together")
        args = SealArgs(
            size=c.sizeof(SealArgs),
            k=SealPages(self.k.handle, self._open_pages("k"), self._pages("k")),
            v=SealPages(self.v.handle, self._open_pages("v"), self._pages("v")),
            n_blocks=numbers[0].shape[0],
            n_kv_heads=self.n_kv_heads,
            from_=numbers[0].data_ptr(),
            to=numbers[1].data_ptr(),
            tokens=None if tokens is None else _ints(tokens, torch.int32, "tokens").data_ptr(),
            refused=_pointer(refused),
        )
        check("seal", library().kvant_cuda_seal(c.byref(args), _stream()))

    def attention(
        self,
        q,
        block_table,
        lengths,
        scale=None,
        out=None,
        lse=None,
        v_center=None,
        k_factors=None,
        v_factors=None,
        causal=True,
        window=0,
        logit_softcap=0.0,
        max_bias=0.0,
        mask=None,
        sinks=None,
    ):
        """softmax(scale q K^T) V: q [batch, heads, head_dim] or, of several query tokens a sequence, [batch, tokens, heads,
        head_dim], block_table int32 [batch, blocks], lengths int32 [batch], the query tokens counted. lse: float32 [batch,
        (tokens,) heads] to fill, or None. mask: float16 [batch, tokens, at least the longest length]; sinks: float32 [heads]."""
        tokens = q.shape[1] if q.dim() == 4 else 1
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        if not q.is_cuda or q.dim() not in (3, 4) or q.shape[-1] != self.head_dim or q.stride(-1) != 1:
            raise ValueError(f"q: a CUDA tensor [batch, (tokens,) heads, {self.head_dim}] with contiguous rows is needed")
        if out.dtype != q.dtype or out.shape != q.shape or out.stride(-1) != 1 or out.device != q.device:
            raise ValueError("out: the shape and dtype of q are needed")
        if lengths.shape != (q.shape[0],) or block_table.dim() != 2 or block_table.shape[0] != q.shape[0]:
            raise ValueError("lengths and block_table do not belong to q: one row a sequence is needed")
        if mask is not None and (
            mask.dtype != torch.float16 or not mask.is_contiguous() or mask.shape[:2] != (q.shape[0], tokens)
        ):
            raise ValueError("mask: a contiguous float16 tensor [batch, tokens, cells] is needed")
        args = AttentionArgs(
            size=c.sizeof(AttentionArgs),
            k_codec=self.k.handle,
            v_codec=self.v.handle,
            k=self._pages("k"),
            v=self._pages("v"),
            k_open=self._open_pages("k"),
            v_open=self._open_pages("v"),
            block_table=_ints(block_table, torch.int32, "block_table").data_ptr(),
            table_stride=block_table.stride(0),
            blocks_per_row=block_table.shape[1],
            lengths=_ints(lengths, torch.int32, "lengths").data_ptr(),
            batch=q.shape[0],
            n_heads=q.shape[-2],
            n_kv_heads=self.n_kv_heads,
            type=_type(q),
            q=q.data_ptr(),
            q_batch_stride=q.stride(0),
            q_head_stride=q.stride(-2),
            out=out.data_ptr(),
            out_batch_stride=out.stride(0),
            out_head_stride=out.stride(-2),
            lse=_pointer(lse),
            scale=1 / math.sqrt(self.head_dim) if scale is None else scale,
            v_center=_pointer(v_center),
            k_factors=_pointer(k_factors),
            v_factors=_pointer(v_factors),
            workspace=self._workspace.data_ptr(),
            workspace_bytes=self._workspace.numel(),
            query_tokens=tokens,
            q_token_stride=q.stride(1) if q.dim() == 4 else 0,
            out_token_stride=out.stride(1) if q.dim() == 4 else 0,
            causal=causal,
            window=window,
            logit_softcap=logit_softcap,
            max_bias=max_bias,
            mask=_pointer(mask),
            mask_token_stride=0 if mask is None else mask.stride(1),
            sinks=_pointer(sinks),
        )
        check("attention", library().kvant_cuda_attention(c.byref(args), _stream()))
        return out

    def decode(self, role, blocks, dtype=torch.bfloat16, center=None, factors=None, is_open=False):
        """Rows of whole sealed blocks, or of open ones (int32 numbers): [64 * len(blocks), kv heads, head_dim]."""
        sealed, opened = (self.k, self.open_k) if role == "k" else (self.v, self.open_v)
        out = torch.empty(
            blocks.shape[0] * PAGE_TOKENS,
            self.n_kv_heads,
            self.head_dim,
            dtype=dtype,
            device=self.pool.device,
        )
        if blocks.shape[0] == 0:
            return out
        args = DecodeArgs(
            size=c.sizeof(DecodeArgs),
            codec=(opened if is_open else sealed).handle,
            pages=self._open_pages(role) if is_open else self._pages(role),
            blocks=_ints(blocks, torch.int32, "blocks").data_ptr(),
            n_blocks=blocks.shape[0],
            n_kv_heads=self.n_kv_heads,
            type=_type(out),
            out=out.data_ptr(),
            token_stride=out.stride(0),
            head_stride=out.stride(1),
            center=_pointer(center),
            factors=_pointer(factors),
        )
        check("decode", library().kvant_cuda_decode(c.byref(args), _stream()))
        return out
