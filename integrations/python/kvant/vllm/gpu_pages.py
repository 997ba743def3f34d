"""A layer's pages in the GPU memory that vLLM assigned: for each block and kv head the page of
keys, then of values."""

from __future__ import annotations

import ctypes as c
from typing import Any, Iterator, Sequence

import torch
from torch import Tensor

from .. import structs as s
from ..codec import Codec
from ..gpu import (
    SCRATCH_BYTES,
    GpuCodec,
    Numbers,
    call,
    pointer,
    query_fields,
    transform_queries,
    type_of,
)
from ..library import PAGE_TOKENS, invoke, library
from . import Stored, is_calibrated
from .codecs import codecs
from .exact import Pool, State

_ROWS_BYTES = 256 << 20  # keys and values that a chunk of a prompt reads as rows
_RELEARNED = 1024  # blocks at a time, whose rows and pages are copied
# By GPU, head_dim and stream: kernels count in a workspace, so overlapping streams need one each.
_workspaces: dict[tuple[str, int, int], Tensor] = {}
_rows: dict[str, Tensor] = {}  # by GPU


def stream_of(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def workspace(head_dim: int, device: torch.device) -> Tensor:
    """The workspace of the current stream. Nothing is allocated while a graph is captured: a stream
    without a workspace uses the first one that was made, because graphs of one model are replayed
    in order."""
    key = str(device), head_dim, stream_of(device)
    if (
        key not in _workspaces
        and device.type == "cuda"
        and torch.cuda.is_current_stream_capturing()
    ):
        others = [made for of, made in _workspaces.items() if of[:2] == key[:2]]
        if others:
            return others[0]
    if key not in _workspaces:
        size = library().kvant_cuda_attention_workspace(head_dim)
        if size == 0:
            invoke("GPU", "kvant_cuda_available")
            raise RuntimeError(
                "kvant: libkvant_cuda has no code for this GPU: build kvant again for its compute "
                "capability, 8.0 or later"
            )
        _workspaces[key] = torch.zeros(size + SCRATCH_BYTES, dtype=torch.uint8, device=device)
    return _workspaces[key]


def room_for_rows(device: torch.device) -> Tensor:
    key = str(device)
    if key not in _rows:
        _rows[key] = torch.empty(_ROWS_BYTES, dtype=torch.uint8, device=device)
    return _rows[key]


class Role:
    def __init__(
        self,
        made: Sequence[Codec],
        base: int,
        block_stride: int,
        head_stride: int,
        device: torch.device,
    ) -> None:
        self.codec, self.codecs, self.device = GpuCodec.of(made[0]), made, device
        self.base, self.block_stride, self.head_stride = base, block_stride, head_stride
        self.open: GpuCodec | None = None
        self.open_rows: Tensor | None = None  # of exact blocks: [blocks, kv heads, 64, head_dim]
        self.numbers = numbers = Numbers([made], device)  # of one layer
        self.has_matrix = numbers.key_transform_size > made[0].head_dim
        parts = [
            x
            for x in (numbers.scale, None if self.has_matrix else numbers.inverse_key_transform)
            if x is not None
        ]
        self.attention_scale = (
            parts[0] * parts[1] if len(parts) == 2 else parts[0] if parts else None
        )
        if self.has_matrix:
            self._back, self._back_scale = self._matrix_back(made[0].head_dim)

    def _matrix_back(self, dim: int) -> tuple[Tensor, float]:
        """W^-1 times the key scale, [kv heads, head_dim, head_dim] in fp16, and the number by which
        all of it was divided."""
        assert self.numbers.inverse_key_transform is not None
        matrix = self.numbers.inverse_key_transform[0].view(-1, dim, dim).transpose(1, 2)
        if self.numbers.scale is not None:
            matrix = matrix * self.numbers.scale[0][:, None]
        most = float(matrix.abs().max())
        return (matrix / most).half().contiguous(), most

    def take(self, other: Role) -> None:
        """Takes another role's numbers of a calibration. They replace the numbers in place, because
        captured graphs have their addresses. The codec stays: of calibrated codecs it knows only
        the kind, and graphs have its address, too."""
        names = ("center", "scale", "key_transform", "inverse_key_transform", "centroids")
        for own, new in (
            *((getattr(self.numbers, n), getattr(other.numbers, n)) for n in (*names, "feedback")),
            (self.attention_scale, other.attention_scale),
        ):
            if own is not None:
                own.copy_(new)
        if self.has_matrix:
            self._back.copy_(other._back)
            self._back_scale = other._back_scale

    def pages(self, head: int = 0) -> Any:
        return s.CudaPages(self.base + head * self.head_stride, self.block_stride, self.head_stride)

    def use(self, rows: Tensor) -> None:
        """Keeps exact blocks in a pool of open pages."""
        self.open, self.open_rows = self.codec.open(), rows

    def open_pages(self, head: int = 0) -> Any:
        if self.open_rows is None:
            return s.CudaPages()
        block, of_head = (2 * stride for stride in self.open_rows.stride()[:2])
        return s.CudaPages(self.open_rows.data_ptr() + head * of_head, block, of_head)

    def sealed(self) -> Any:
        """The struct for sealing rows of open pages."""
        return s.CudaSealPages(self.codec.handle, self.open_pages(), self.pages())

    def written(self, rows: Tensor, exact: bool = False) -> Any:
        """The struct for appending rows [n, kv heads, head_dim], each contiguous; to exact blocks
        or to pages."""
        assert not exact or self.open is not None
        return s.CudaRows(
            codec=self.open.handle if exact and self.open else self.codec.handle,
            pages=self.open_pages() if exact else self.pages(),
            rows=rows.data_ptr(),
            token_stride=rows.stride(0),
            head_stride=rows.stride(1),
            center=pointer(self.numbers.center),
            scale=pointer(self.numbers.scale),
            key_transform=pointer(self.numbers.key_transform),
        )

    def read(
        self,
        blocks: Tensor,
        heads: slice,
        out: Tensor,
        room: Tensor,
        entries: Tensor | None = None,
    ) -> None:
        """Decodes the rows of some kv heads in whole blocks, int32 [n], to out [64 n, heads,
        head_dim]. `room`: as many 16-bit numbers, for temporary results. entries: of the same
        blocks in the table of exact blocks."""
        if not self.has_matrix:
            self._decode(blocks, heads, out, False, entries)
            return
        turned = out.view(torch.float16)
        rows = room.view(torch.float16).view(out.shape[1], len(out), -1)
        self._decode(blocks, heads, turned, True, entries)
        torch.bmm(turned.transpose(0, 1), self._back[heads], out=rows)
        assert self.numbers.center is not None  # of transform=file
        torch.add(
            self.numbers.center[0, heads], rows.transpose(0, 1), alpha=self._back_scale, out=out
        )

    def _decode(
        self,
        blocks: Tensor,
        heads: slice,
        out: Tensor,
        transformed: bool,
        entries: Tensor | None,
    ) -> None:
        self._decode_from(self.codec, self.pages(heads.start), blocks, heads, out, transformed)
        if entries is not None and self.open is not None:
            blocks = torch.where(entries < 0, -1 - entries, -1)  # below 0: skipped
            pages = self.open_pages(heads.start)
            self._decode_from(self.open, pages, blocks, heads, out, transformed)

    def _decode_from(
        self,
        codec: GpuCodec,
        pages: Any,
        blocks: Tensor,
        heads: slice,
        out: Tensor,
        transformed: bool,
    ) -> None:
        of = self.numbers
        numbers = (
            (None, None, None) if transformed else (of.center, of.scale, of.inverse_key_transform)
        )
        center, scale, inverse, centroids = (
            None if x is None else pointer(x[0, heads]) for x in (*numbers, of.centroids)
        )
        arguments = s.CudaDecodeArgs.new(
            codec=codec.handle,
            pages=pages,
            blocks=blocks.data_ptr(),
            n_blocks=len(blocks),
            n_kv_heads=out.shape[1],
            type=type_of(out),
            out=out.data_ptr(),
            token_stride=out.stride(0),
            head_stride=out.stride(1),
            center=center,
            scale=scale,
            inverse_key_transform=inverse,
            transformed=transformed,
            centroids=centroids,
        )
        call("decode", arguments, self.device)


class LayerPages:
    def __init__(
        self, stored: Stored, memory: Tensor, layer: int, heads: range, head_dim: int
    ) -> None:
        """`memory`: vLLM's tensor [blocks, kv heads, tokens, content], of any type."""
        made = [codecs(stored, role, head_dim, layer, heads) for role in "kv"]
        block, head, token, _ = (stride * memory.element_size() for stride in memory.stride())
        head_bytes = (
            token * PAGE_TOKENS
        )  # pages, and padding where layers differ in size (even_cells)
        head = head_bytes if len(heads) == 1 else head
        fits = sum(codec[0].page_bytes for codec in made) <= head_bytes
        if (
            memory.shape[2] != PAGE_TOKENS
            or token != memory.shape[3] * memory.element_size()
            or not fits
            or head != head_bytes
        ):
            raise ValueError(
                f"kvant: --block-size {PAGE_TOKENS} and the layout LBHNC are needed, not "
                f"{memory.shape[2]}"
            )
        if memory.data_ptr() % 16 or block % 16:
            raise ValueError("kvant: vLLM's blocks are not aligned to 16 bytes")
        self.device = memory.device  # vLLM frees its memory
        self.n_kv_heads, self.head_dim = len(heads), head_dim
        self._made_of = stored, layer, heads, head_dim
        base = memory.data_ptr()
        places = (base, base + made[0][0].page_bytes)
        self.k, self.v = (
            Role(part, at, block, head, memory.device) for part, at in zip(made, places)
        )
        pair = self.k.codec.handle, self.v.codec.handle
        invoke("codecs", "kvant_cuda_attention_check", *pair)
        self.exact: State | None = None  # of the last step

    def use(self, pool: Pool) -> None:
        """Keeps the first and the newest blocks of sequences exactly, as steps say."""
        for role, rows in zip((self.k, self.v), pool.rows):
            role.use(rows)

    def write(
        self,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        queries: Tensor | None = None,
        exact: State | None = None,
    ) -> Tensor | None:
        """Writes rows [n, kv heads, head_dim]; slots below 0 are padding. `queries`: of the same
        tokens, [n, heads, head_dim]. If keys have the matrix of transform=file, the result holds
        the queries multiplied by it, in float32; the same launch may do both. exact: the state of
        exact blocks after the step's plan."""
        if len(slots) == 0:
            return None
        keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values))
        if self.k.open is None or (exact is None and self.exact is None):
            return self._append(keys, values, slots, queries)
        if exact is None or (self.exact is not None and exact is not self.exact):
            return self.write_apart(keys, values, slots)
        self.exact = exact
        if len(slots) > exact.most_staged:
            self._append(keys, values, slots)
        rotated = self._append(keys, values, exact.rows, queries, True)
        self._seal(exact.from_, exact.to, exact.n_sealed)
        return rotated

    def write_apart(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Writes rows that no step of the state has planned, to pages and to the blocks that are
        exact."""
        if len(slots) == 0:
            return
        keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values))
        self._append(keys, values, slots)
        if self.exact is not None:
            self._append(keys, values, self.exact.rows_of(slots), exact=True, apart=True)

    def flush(self) -> None:
        """Seals the blocks that are exact now. They stay exact until the state forgets them."""
        if self.exact is not None:
            rows = self.exact.everything()
            if self.device.type == "cuda":  # sealing reads the list before earlier work ends
                torch.cuda.current_stream(self.device).synchronize()
            self._seal(*rows)

    def forget(self) -> None:
        """After flush() of all layers: no block is exact any more."""
        if self.exact is not None:
            self.exact.forget()

    def _seal(self, from_: Tensor, to: Tensor, n: Tensor) -> None:
        arguments = s.CudaSealRowsArgs.new(
            k=self.k.sealed(),
            v=self.v.sealed(),
            most_rows=len(to),
            n_kv_heads=self.n_kv_heads,
            from_=from_.data_ptr(),
            to=to.data_ptr(),
            n_rows=n.data_ptr(),
        )
        call("seal_rows", arguments, self.device)

    def _append(
        self,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        queries: Tensor | None = None,
        exact: bool = False,
        apart: bool = False,
    ) -> Tensor | None:
        rotated, fields = None, {}
        if queries is not None and self.k.has_matrix:
            rotated = torch.empty(queries.shape, dtype=torch.float32, device=queries.device)
            own = query_fields(
                self.k.codec,
                queries,
                pointer(self.k.numbers.inverse_key_transform),
                self.n_kv_heads,
                rotated,
            )
            fields = {"queries": s.CudaKernelQueryArgs.new(**own)}
        arguments = s.CudaKernelAppendArgs.new(
            k=self.k.written(keys, exact),
            v=self.v.written(values, exact),
            type=type_of(keys),
            n_tokens=len(keys),
            n_kv_heads=self.n_kv_heads,
            slots=slots.data_ptr(),
            k_feedback=pointer(self.k.numbers.feedback),
            centroids=(c.c_void_p * 2)(
                pointer(self.k.numbers.centroids), pointer(self.v.numbers.centroids)
            ),
            # vLLM writes slots, lengths and tables before the model begins.
            slots_ready=not apart,
            clear_refused=exact,
            **fields,
        )
        call("kernel_append", arguments, self.device)
        return rotated

    def relearn(self, memory: Tensor) -> None:
        """Encodes the rows of used blocks again, with the transforms that the preset has learned.
        Pages pass through temporary blocks, because an encoder writes keys and values together.
        vLLM's memory begins as zeros, so a block of zeros holds no rows, or rows of zeros. A cache
        has tens of thousands of blocks, and encoding all of them would take seconds."""
        self.flush()
        stored, *rest = self._made_of
        part = min(_RELEARNED, len(memory))
        temporary = torch.zeros_like(memory[:part], memory_format=torch.contiguous_format)
        fresh = LayerPages(stored, temporary, *rest)
        first = self.k.codecs[0].page_bytes
        bytes_ = {"k": slice(first), "v": slice(first, first + self.v.codecs[0].page_bytes)}
        to, made = (
            x.view(torch.uint8).view(len(x), self.n_kv_heads, -1) for x in (memory, temporary)
        )
        shape = PAGE_TOKENS * part, self.n_kv_heads, self.head_dim
        room = torch.empty(3, *shape, dtype=torch.float16, device=self.device)
        slots = torch.arange(shape[0], device=self.device)
        every = slice(0, self.n_kv_heads)
        used = [x.flatten(1).any(1) for x in to.split(part)]
        for blocks in torch.cat(used).nonzero().flatten().to(torch.int32).split(part):
            n = PAGE_TOKENS * len(blocks)
            for role, out in ((self.k, room[0, :n]), (self.v, room[1, :n])):
                role.read(blocks, every, out, room[2, :n])
            temporary.zero_()
            fresh.write(room[0, :n], room[1, :n], slots[:n])
            for name, own in bytes_.items():
                if is_calibrated(getattr(stored, name)):
                    to[blocks.long(), :, own] = made[: len(blocks), :, own]
        self.k.take(fresh.k)
        self.v.take(fresh.v)

    def fit_rows(self, n: int, dtype: torch.dtype) -> int:
        """For how many kv heads there is room for the rows of n tokens."""
        return room_for_rows(self.device).view(dtype).numel() // (2 * n * self.head_dim)

    def rows(
        self,
        blocks: Tensor,
        past: int,
        keys: Tensor,
        values: Tensor,
        entries: Tensor | None = None,
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Unpacks a sequence whose first `past` tokens are in blocks and whose newest tokens are
        rows [n, kv heads, head_dim]. Yields the rows of all tokens, for as many kv heads at a time
        as fit_rows() says, which must not be 0. Each is valid until the next."""
        n = past + len(keys)
        room, most = room_for_rows(self.device).view(keys.dtype), self.fit_rows(n, keys.dtype)
        for first in range(0, self.n_kv_heads, most):
            heads = slice(first, min(first + most, self.n_kv_heads))
            made = room[: 2 * n * (heads.stop - first) * self.head_dim].view(
                2, n, heads.stop - first, self.head_dim
            )
            read = slice(len(blocks) * PAGE_TOKENS)
            for role, newest, out in zip(
                (self.k, self.v), (keys, values), made
            ):  # values last: keys need their room
                role.read(blocks, heads, out[read], made[1][read], entries)
                out[past:] = newest[:, heads]
            yield heads, *made

    def table_of(self, batch: Any) -> Tensor:
        """The table of a batch, which names exact blocks if this layer has some. Pages of exact
        blocks lack rows. So layers that attend to these pages without writing to them need the
        state with which they are written."""
        if self.exact is None:
            return batch.block_table
        planned = getattr(batch, "exact", None) is self.exact
        return self.exact.table if planned else self.exact.entries_of(batch.block_table)

    def _rotated(self, q: Tensor, part: Any) -> Tensor:
        """Multiplies the queries of a part by the matrix of transform=file: float32, in the same
        rows as in q."""
        made = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        rows = slice(part.first_row, part.last_row)
        inverse = pointer(self.k.numbers.inverse_key_transform)
        transform_queries(self.k.codec, q[rows], inverse, self.n_kv_heads, made[rows])
        return made

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
        head_dim]. rotated: the result of write(), if it had these queries."""
        if part.first_row == part.last_row:
            return
        k, v = self.k, self.v
        if k.has_matrix:
            q = self._rotated(q, part) if rotated is None else rotated
        sinks = (
            None
            if options.sinks is None
            else options.sinks.detach().to(self.device, torch.float32).contiguous()
        )
        room, table = workspace(self.head_dim, self.device), self.table_of(batch)
        n_blocks = (
            -(-part.most_tokens // PAGE_TOKENS) or table.shape[1]
        )  # few: more heads fit into the workspace
        arguments = s.CudaKernelAttentionArgs.new(
            k_codec=k.codec.handle,
            v_codec=v.codec.handle,
            k=k.pages(),
            v=v.pages(),
            k_open=k.open_pages(),
            v_open=v.open_pages(),
            block_table=table[part.first].data_ptr(),
            table_stride=table.stride(0),
            blocks_per_row=n_blocks,
            lengths=batch.seq_lens[part.first :].data_ptr(),
            batch=part.last - part.first,
            n_heads=q.shape[1],
            n_kv_heads=self.n_kv_heads,
            type=type_of(q),
            q=q.data_ptr(),
            q_head_stride=q.stride(1),
            out=out.data_ptr(),
            out_type=type_of(out),
            out_head_stride=out.stride(1),
            scale=options.scale,
            v_center=pointer(v.numbers.center),
            k_scale=pointer(k.attention_scale),
            v_scale=pointer(v.attention_scale),
            workspace=room.data_ptr(),
            workspace_bytes=room.numel(),
            query_tokens=part.most_queries,
            query_starts=batch.query_start_loc[part.first :].data_ptr(),
            q_token_stride=q.stride(0),
            out_token_stride=out.stride(0),
            causal=options.causal,
            window=options.window,
            logit_softcap=options.softcap,
            sinks=pointer(sinks),
            centroids=(c.c_void_p * 2)(pointer(k.numbers.centroids), pointer(v.numbers.centroids)),
            table_ready=True,
        )
        call("kernel_attention", arguments, self.device)
