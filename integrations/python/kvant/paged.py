"""A pool of compressed pages on a GPU whose blocks the engine manages: PyTorch tensors in and out
(kvant/cuda.h)."""

import math

import torch

from . import checks
from .codec import Codec
from .gpu import (
    SCRATCH_BYTES,
    SCRATCH_ROWS,
    GpuCodec,
    Numbers,
    call,
    learn,
    pointer,
    transform_queries,
    type_of,
)
from .library import MAX_HEAD_DIM, PAGE_TOKENS, Error, invoke, library
from .structs import (
    CudaAppendArgs,
    CudaAttentionArgs,
    CudaDecodeArgs,
    CudaPages,
    CudaRows,
    CudaSealArgs,
    CudaSealPages,
)

_MOST_HEADS = 65535
_CUDA = 80  # KVANT_ERR_CUDA
_scratch = {}  # by device, head_dim and stream: calls on one stream never overlap


class PagedCache:
    """n_blocks sealed blocks of 64 tokens and n_open_blocks fp16 blocks; a block holds the K and V
    pages of all kv heads. The memory is two tensors, `pool` and `open_pool`. Block tables name
    sealed block b by b, and fp16 block b by -1 - b.

    Every call checks shapes, dtypes, devices and strides. Numbers of blocks and slots are on the
    GPU and must be right: a wrong number reads or writes other memory. With check_numbers the calls
    read and check them, and wait for the GPU. learn is for keys with transform=first."""

    def __init__(
        self,
        k_spec,
        v_spec,
        n_kv_heads,
        head_dim,
        n_blocks,
        n_open_blocks=0,
        seed=0,
        device="cuda",
        check_numbers=False,
    ):
        if torch.device(device).type != "cuda":
            raise ValueError(f"device: a GPU is needed, not {device}")
        self.n_kv_heads = checks.count(n_kv_heads, "n_kv_heads", most=_MOST_HEADS)
        self.head_dim = checks.count(head_dim, "head_dim", most=MAX_HEAD_DIM)
        self.n_blocks = checks.count(n_blocks, "n_blocks")
        self.n_open_blocks = checks.count(n_open_blocks, "n_open_blocks", least=0)
        self.check_numbers = check_numbers
        self._k_codec, v_codec = (
            Codec(spec, head_dim, role, seed=seed) for spec, role in ((k_spec, "k"), (v_spec, "v"))
        )
        self.k, self.v = GpuCodec.of(self._k_codec), GpuCodec.of(v_codec)
        self._learned = None  # Numbers of keys
        self._keys_have_center = False
        pair = self.k.handle, self.v.handle
        what = f"keys {k_spec!r} with values {v_spec!r}"
        invoke(what, "kvant_cuda_attention_check", *pair)
        self._v_offset = self.k.page_bytes * self.n_kv_heads
        self.block_bytes = self._v_offset + self.v.page_bytes * self.n_kv_heads
        self.open_k, self.open_v = self.k.open(), self.v.open()
        self._open_bytes = self.open_k.page_bytes
        invoke("GPU", "kvant_cuda_available")
        self.pool = self._bytes(self.n_blocks * self.block_bytes, device)
        self.device = self.pool.device
        self.open_pool = self._bytes(
            2 * self.n_open_blocks * self.n_kv_heads * self._open_bytes, self.device
        )
        with torch.cuda.device(self.device):
            size = library().kvant_cuda_attention_workspace(self.head_dim)
        if size == 0:
            raise Error(
                "attention workspace",
                _CUDA,
                "libkvant_cuda has no code for this GPU: build kvant again for its compute "
                "capability, 8.0 or later",
            )
        self._workspace = self._bytes(size, self.device)
        self._workspaces = {self._stream(): self._workspace}

    @staticmethod
    def _bytes(n, device):
        return torch.zeros(n, dtype=torch.uint8, device=device)

    def _stream(self):
        with torch.cuda.device(self.device):
            return torch.cuda.current_stream().cuda_stream

    def _workspace_for(self, rows):
        """Kernels count in a workspace, so each stream has its own; calls on one stream are
        ordered. For many query rows the workspace has scratch memory, which all caches share.
        Nothing is allocated while a graph is captured: a stream without a workspace uses the one of
        the stream that made the cache."""
        stream = self._stream()
        if torch.cuda.is_current_stream_capturing():
            return self._workspaces.get(stream, self._workspace)
        if rows <= SCRATCH_ROWS:
            if stream not in self._workspaces:
                self._workspaces[stream] = self._bytes(self._workspace.numel(), self.device)
            return self._workspaces[stream]
        key = str(self.device), self.head_dim, stream
        if key not in _scratch:
            _scratch[key] = self._bytes(self._workspace.numel() + SCRATCH_BYTES, self.device)
        return _scratch[key]

    def _pages(self, role):
        if role == "k":
            return CudaPages(self.pool.data_ptr(), self.block_bytes, self.k.page_bytes)
        return CudaPages(self.pool.data_ptr() + self._v_offset, self.block_bytes, self.v.page_bytes)

    def _open_pages(self, role):
        if self.n_open_blocks == 0:
            return CudaPages()
        half = self.n_kv_heads * self._open_bytes
        return CudaPages(
            self.open_pool.data_ptr() + (half if role == "v" else 0), 2 * half, self._open_bytes
        )

    def _need_open_blocks(self):
        if self.n_open_blocks == 0:
            raise ValueError("this cache has no exact pages: create it with n_open_blocks")

    def _channels(self, tensor, what):
        """The pointer of a centre or scale, or None."""
        if tensor is None:
            return None
        shape = (self.n_kv_heads, self.head_dim)
        return checks.tensor(tensor, what, shape, ("float32",), self.device).data_ptr()

    def learn(self, k, q, rope=None):
        """Learns the centre and the matrix of keys with transform=first, before anything is
        written. It uses keys [n, kv heads, head_dim] and queries [n, heads, head_dim] of a
        sequence's first tokens. It computes on the CPU. It needs at least 64 tokens, and 1024
        tokens are enough. An engine keeps their rows meanwhile. `rope`: a kvant.Rope, for a matrix
        that fits its n_positions. Later calls need no centre and scale of keys."""
        checks.tensor(k, "k", (None, self.n_kv_heads, self.head_dim), checks.NUMBERS, self.device)
        checks.tensor(q, "q", (k.shape[0], None, self.head_dim), checks.NUMBERS, self.device)
        if q.shape[1] % self.n_kv_heads or k.shape[0] == 0:
            raise ValueError(
                f"q: {q.shape[0]} tokens of {q.shape[1]} heads; "
                f"heads are a multiple of {self.n_kv_heads} kv heads"
            )
        if rope is not None and not rope.n_positions:
            rope = rope._replace(n_positions=PAGE_TOKENS * self.n_blocks)
        made = learn(self._k_codec, k, q, rope)
        self.k = GpuCodec.of(made[0])
        self.open_k, self._learned = self.k.open(), Numbers([made], self.device)
        self._keys_have_center = self._learned.center is not None

    def _of_keys(self, name, given=None):
        """A pointer to a learned array of keys, unless the caller passes one."""
        return (
            given
            if given is not None or self._learned is None
            else pointer(getattr(self._learned, name))
        )

    def _has_matrix(self):
        return self._learned is not None and self._learned.key_transform_size > self.head_dim

    def _rotated(self, q):
        """Multiplies queries by the learned matrix: float32."""
        out = torch.empty(q.shape, dtype=torch.float32, device=self.device)
        rows, inverse = q.reshape(-1, *q.shape[-2:]), self._of_keys("inverse_key_transform")
        transform_queries(self.k, rows, inverse, self.n_kv_heads, out)
        return out

    def _word(self, tensor):
        if tensor is None:
            return None
        return checks.tensor(
            tensor, "refused", (1,), ("int32",), self.device, written=True
        ).data_ptr()

    def _numbers(self, tensor, what, n, low, high):
        """int32 numbers of blocks."""
        checks.tensor(tensor, what, (n,), ("int32",), self.device)
        if self.check_numbers:
            checks.in_range(tensor, what, low, high)
        return tensor

    def append(
        self,
        k,
        v,
        slots,
        k_center=None,
        v_center=None,
        k_scale=None,
        v_scale=None,
        refused=None,
        to_open=False,
    ):
        """Writes tokens: k, v [n, kv heads, head_dim] of one dtype, slots int64 [n] (64 * block +
        offset, negative skips). Centres and scales are float32 [kv heads, head_dim]: the centre is
        subtracted from rows, which are then divided by the scale. `to_open`: write to fp16 blocks,
        the only way for codecs with groups of 32 tokens. `refused`: an int32 CUDA tensor [1] that
        collects the reasons why rows were not written."""
        if to_open:
            self._need_open_blocks()
        checks.tensor(slots, "slots", (None,), ("int64",), self.device)
        n = slots.shape[0]
        shape = (n, self.n_kv_heads, self.head_dim)
        checks.tensor(k, "k", shape, checks.NUMBERS, self.device, rows=True)
        checks.tensor(v, "v", shape, (checks.name_of(k.dtype),), self.device, rows=True)
        if self.check_numbers:
            blocks = self.n_open_blocks if to_open else self.n_blocks
            checks.in_range(slots, "slots", -(2**63), PAGE_TOKENS * blocks)
        args = CudaAppendArgs.new(
            type=type_of(k),
            n_tokens=n,
            n_kv_heads=self.n_kv_heads,
            slots=slots.data_ptr(),
            refused=self._word(refused),
        )
        codecs = (self.open_k, self.open_v) if to_open else (self.k, self.v)
        pages = self._open_pages if to_open else self._pages
        for name, codec, rows, center, row_scale in (
            ("k", codecs[0], k, k_center, k_scale),
            ("v", codecs[1], v, v_center, v_scale),
        ):
            part = CudaRows(
                codec=codec.handle,
                pages=pages(name),
                rows=rows.data_ptr(),
                token_stride=rows.stride(0),
                head_stride=rows.stride(1),
                center=self._channels(center, f"{name}_center"),
                scale=self._channels(row_scale, f"{name}_scale"),
            )
            if name == "k":
                part.center = self._of_keys("center", part.center)
                part.scale = self._of_keys("scale", part.scale)
                part.key_transform = self._of_keys("key_transform")
            setattr(args, name, part)
        call("append", args, self.device)
        self._keys_have_center |= k_center is not None

    def seal(self, open_blocks, blocks, tokens=None, refused=None):
        """Quantises fp16 blocks into sealed blocks: int32 numbers, negative ones skip. `tokens`:
        int32, how many tokens of each fp16 block were written, or None for all 64."""
        self._need_open_blocks()
        least = -(2**31)
        self._numbers(open_blocks, "open_blocks", None, least, self.n_open_blocks)
        n = open_blocks.shape[0]
        self._numbers(blocks, "blocks", n, least, self.n_blocks)
        if tokens is not None:
            self._numbers(tokens, "tokens", n, 0, PAGE_TOKENS + 1)
        args = CudaSealArgs.new(
            k=CudaSealPages(self.k.handle, self._open_pages("k"), self._pages("k")),
            v=CudaSealPages(self.v.handle, self._open_pages("v"), self._pages("v")),
            n_blocks=n,
            n_kv_heads=self.n_kv_heads,
            from_=open_blocks.data_ptr(),
            to=blocks.data_ptr(),
            tokens=pointer(tokens),
            refused=self._word(refused),
        )
        call("seal", args, self.device)

    def _check_attention(self, q, block_table, lengths, out, lse, mask, sinks):
        """Checks the tensors of `attention`. Returns whether q has several tokens per sequence, and
        the output."""
        several = len(getattr(q, "shape", ())) == 4
        shape = (None, None, None, self.head_dim) if several else (None, None, self.head_dim)
        checks.tensor(q, "q", shape, checks.NUMBERS, self.device, rows=True)
        batch, heads, tokens = q.shape[0], q.shape[-2], q.shape[1] if several else 1
        if batch == 0 or tokens == 0 or heads == 0 or heads % self.n_kv_heads != 0:
            raise ValueError(
                f"q: {batch} sequences of {heads} heads; "
                f"heads are a multiple of {self.n_kv_heads} kv heads"
            )
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        dtype = (checks.name_of(q.dtype),)
        checks.tensor(out, "out", tuple(q.shape), dtype, self.device, rows=True, written=True)
        checks.table(block_table, "block_table", (batch, None), self.device)
        if block_table.shape[1] == 0:
            raise ValueError("block_table: rows of at least one block are needed")
        checks.tensor(lengths, "lengths", (batch,), ("int32",), self.device)
        if mask is not None:
            checks.tensor(mask, "mask", (batch, tokens, None), ("float16",), self.device)
            if mask.shape[2] < 64 * block_table.shape[1]:
                raise ValueError("mask: a cell for every token of the table is needed")
        if sinks is not None:
            checks.tensor(sinks, "sinks", (heads,), ("float32",), self.device)
        if lse is not None:
            checks.tensor(lse, "lse", tuple(q.shape[:-1]), ("float32",), self.device, written=True)
        return several, out

    def attention(
        self,
        q,
        block_table,
        lengths,
        scale=None,
        out=None,
        lse=None,
        v_center=None,
        k_scale=None,
        v_scale=None,
        causal=True,
        window=0,
        logit_softcap=0.0,
        max_bias=0.0,
        mask=None,
        sinks=None,
    ):
        """softmax(scale q K^T) V: q [batch, heads, head_dim], or [batch, tokens, heads, head_dim]
        for several query tokens per sequence; block_table int32 [batch, blocks]; lengths int32
        [batch], the query tokens counted. `lse`: float32 [batch, (tokens,) heads] to fill, or None.
        `mask`: float16 [batch, tokens, cells], with a cell for every token of the table; `sinks`:
        float32 [heads]. With a centre of keys, which scores lack, neither a softcap nor sinks are
        possible, and lse lacks scale * <q, centre>."""
        several, out = self._check_attention(q, block_table, lengths, out, lse, mask, sinks)
        batch, heads, tokens = q.shape[0], q.shape[-2], q.shape[1] if several else 1
        scale = 1 / math.sqrt(self.head_dim) if scale is None else float(scale)
        if not math.isfinite(scale):
            raise ValueError(f"scale: {scale} is not finite")
        if self._keys_have_center and (logit_softcap or sinks is not None):
            raise ValueError(
                "logit_softcap, sinks: they need whole scores, but scores lack the centre of "
                "these keys: use a codec of keys without a centre"
            )
        if self.check_numbers:
            checks.in_range(block_table, "block_table", -self.n_open_blocks, self.n_blocks)
        workspace, target = self._workspace_for(heads // self.n_kv_heads * tokens), out
        if self._has_matrix():
            q = self._rotated(q)
            target = torch.empty(q.shape, dtype=torch.float32, device=self.device)
        args = CudaAttentionArgs.new(
            k_codec=self.k.handle,
            v_codec=self.v.handle,
            k=self._pages("k"),
            v=self._pages("v"),
            k_open=self._open_pages("k"),
            v_open=self._open_pages("v"),
            block_table=block_table.data_ptr(),
            table_stride=block_table.stride(0),
            blocks_per_row=block_table.shape[1],
            lengths=lengths.data_ptr(),
            batch=batch,
            n_heads=heads,
            n_kv_heads=self.n_kv_heads,
            type=type_of(q),
            q=q.data_ptr(),
            q_batch_stride=q.stride(0),
            q_head_stride=q.stride(-2),
            out=target.data_ptr(),
            out_batch_stride=target.stride(0),
            out_head_stride=target.stride(-2),
            lse=pointer(lse),
            scale=scale,
            v_center=self._channels(v_center, "v_center"),
            k_scale=self._of_keys("scale", self._channels(k_scale, "k_scale")),
            v_scale=self._channels(v_scale, "v_scale"),
            workspace=workspace.data_ptr(),
            workspace_bytes=workspace.numel(),
            query_tokens=tokens,
            q_token_stride=q.stride(1) if several else 0,
            out_token_stride=target.stride(1) if several else 0,
            causal=causal,
            window=window,
            logit_softcap=logit_softcap,
            max_bias=max_bias,
            mask=pointer(mask),
            mask_token_stride=0 if mask is None else mask.stride(1),
            sinks=pointer(sinks),
        )
        call("attention", args, self.device)
        return out if target is out else out.copy_(target)

    def decode(self, role, blocks, dtype=torch.bfloat16, center=None, scale=None, is_open=False):
        """Decodes the rows of whole sealed blocks, or of fp16 blocks (int32 numbers): [64 *
        len(blocks), kv heads, head_dim]."""
        checks.choice(role, "role", ("k", "v"))
        checks.choice(checks.name_of(dtype), "dtype", checks.NUMBERS)
        if is_open:
            self._need_open_blocks()
        self._numbers(blocks, "blocks", None, 0, self.n_open_blocks if is_open else self.n_blocks)
        sealed, opened = (self.k, self.open_k) if role == "k" else (self.v, self.open_v)
        n = blocks.shape[0]
        out = torch.empty(
            n * PAGE_TOKENS, self.n_kv_heads, self.head_dim, dtype=dtype, device=self.device
        )
        args = CudaDecodeArgs.new(
            codec=(opened if is_open else sealed).handle,
            pages=self._open_pages(role) if is_open else self._pages(role),
            blocks=blocks.data_ptr(),
            n_blocks=n,
            n_kv_heads=self.n_kv_heads,
            type=type_of(out),
            out=out.data_ptr(),
            token_stride=out.stride(0),
            head_stride=out.stride(1),
            center=self._channels(center, "center"),
            scale=self._channels(scale, "scale"),
        )
        if role == "k":
            args.center = self._of_keys("center", args.center)
            args.scale = self._of_keys("scale", args.scale)
            args.inverse_key_transform = self._of_keys("inverse_key_transform")
        if n > 0:
            call("decode", args, self.device)
        return out
