"""Rows to pages and back on a GPU. The bytes equal the bytes of pages.py, except for centers and
scales of chunks, whose last bits differ.

One call serves all layers if nothing depends on the layer: in rows and in pages, the tokens of
layer 1 follow the tokens of layer 0."""

from __future__ import annotations

import ctypes as c
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor

from .. import structs as s
from ..arrays import np
from ..gpu import GpuCodec, Numbers, calls, type_of
from ..library import PAGE_TOKENS, Error
from . import state
from .layout import RAW, Layout
from .records import Found
from .stored import Stored

Own = list[list[Tensor | None]]  # for each role a center and a scale, [layers, kv heads, head_dim]
Each = Callable[[Stored, Callable[[int], None]], None]
_REFUSED = {1: (50, "a NaN or an infinity"), 2: (51, "a row beyond fp16's range")}


class _Role(NamedTuple):
    codec: GpuCodec
    numbers: Numbers

    def of(self, name: str, layer: int, own: Tensor | None = None) -> int | None:
        """The address of a layer's array `name`. `own`: the chunk's array, which replaces the
        codecs'."""
        table = getattr(self.numbers, name) if own is None else own
        return None if table is None else table.data_ptr() + 4 * layer * table.stride(0)  # float32


class _Plan(NamedTuple):
    roles: tuple[_Role, _Role]
    slots: Tensor  #: int64, of all tokens of all layers
    blocks: Tensor  #: int32, 0, 1, ...
    sample: Tensor
    per_layer: bool


def _one_by_one(stored: Stored, work: Callable[[int], None]) -> None:
    for layer in range(stored.layout.n_layers):
        work(layer)


class GpuPages:
    """Any number of threads may use an object of this class at once. The GPU has only pages; the
    computer writes and checks their records. `each` calls a function for all layers."""

    def __init__(self, device: str | torch.device, each: Each = _one_by_one) -> None:
        self.device, self._each = torch.device(device), each
        self._plans: dict[tuple[Layout, int], _Plan] = {}

    def takes(self, stored: Stored) -> bool:
        """Whether the GPU can store this layout: it supports one codec of keys and one of
        values."""
        if stored.layout.kind == RAW:
            return False
        try:
            self._plan(stored)
        except Error:
            return False
        return True

    # ---- with the bytes on the host ----

    def encode(self, source: Tensor, stored: Stored, body: np.ndarray) -> None:
        """Writes all of body."""
        with self._stream():
            made, own, refused = self.to_pages(source.to(self.device, non_blocking=True), stored)
            pages = np.empty(made.numel(), np.uint8)
            torch.from_numpy(pages).copy_(made, non_blocking=True)
            numbers = [[x if x is None else x.cpu().numpy() for x in of] for of in own]
            bits = int(refused)
            self._wait()
        for bit, (status, reason) in _REFUSED.items():
            if bits & bit:
                raise Error("rows", status, reason)

        def write(layer: int) -> None:
            for role, of in enumerate(numbers):
                affine = [x if x is None else x[layer] for x in of]
                blocks = _of_role(pages, stored, layer, role)
                stored.records.write(body, layer, role, affine, iter(blocks))

        self._each(stored, write)

    def load(self, body: np.ndarray, stored: Stored) -> tuple[Tensor, Own]:
        """The checked pages of a body, and its centers and scales, on the GPU."""
        n = stored.layout.n_layers
        pages = np.empty(n * stored.layout.n_blocks * stored.block_size, np.uint8)
        found: list[list[Found]] = [[] for _ in range(n)]

        def read(layer: int) -> None:
            found[layer] = [stored.records.read(body, layer, role) for role in (0, 1)]
            for role, of in enumerate(found[layer]):
                for block, codes in zip(_of_role(pages, stored, layer, role), of.codes):
                    c.memmove(block.ctypes.data, codes, block.size)

        self._each(stored, read)
        with self._stream():
            held = torch.from_numpy(pages).to(self.device)
            own = [
                [self._both(found, role, name) for name in ("center", "scale")] for role in (0, 1)
            ]
            self._wait()
        return held, own

    def _both(self, found: list[list[Found]], role: int, name: str) -> Tensor | None:
        numbers = [getattr(layer[role], name) for layer in found]
        return None if numbers[0] is None else torch.from_numpy(np.stack(numbers)).to(self.device)

    def decode(self, held: tuple[Tensor, Own], stored: Stored, target: Tensor) -> None:
        with self._stream():
            rows = (
                target
                if target.device == self.device
                else torch.empty_like(target, device=self.device)
            )
            self.from_pages(*held, stored, rows)
            if rows is not target:
                target.copy_(rows, non_blocking=True)
            self._wait()

    def _stream(self) -> Any:
        """Runs a thread's copies on a separate stream, so that threads do not wait for each
        other."""
        if self.device.type != "cuda":  # a test's
            return torch.no_grad()
        return torch.cuda.stream(torch.cuda.Stream(self.device))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    # ---- with all on the GPU, on the current stream ----

    def to_pages(self, rows: Tensor, stored: Stored) -> tuple[Tensor, Own, Tensor]:
        """Pages layer by layer and block by block, keys first, the chunk's centers and scales, and
        whether rows were refused (bits, int32)."""
        plan, layout = self._plan(stored), stored.layout
        body = torch.zeros(
            layout.n_layers * layout.n_blocks * stored.block_size,
            dtype=torch.uint8,
            device=self.device,
        )
        refused = torch.zeros((), dtype=torch.int32, device=self.device)
        own = self._own_state(rows, stored, plan)
        args = s.CudaAppendArgs.new(
            type=type_of(rows),
            n_tokens=plan.slots.numel(),
            n_kv_heads=layout.n_kv_heads,
            refused=refused.data_ptr(),
        )
        if plan.per_layer:
            args.n_tokens = layout.n_tokens
        parts = args.k, args.v
        for role, part in enumerate(parts):
            part.codec, part.pages = plan.roles[role].codec.handle, _pages(body, stored, role)
            part.token_stride, part.head_stride = layout.row, layout.head_stride
        with calls(self.device) as run:
            for layer in range(layout.n_layers if plan.per_layer else 1):
                args.slots = plan.slots.data_ptr() + 8 * layer * layout.n_tokens
                for role, part in enumerate(parts):
                    half, (center, scale) = plan.roles[role], own[role]
                    part.rows = _row(rows, layout, role, layer)
                    part.center = half.of("center", layer, center)
                    part.scale = half.of("scale", layer, scale)
                    part.key_transform = half.of("key_transform", layer)
                    args.centroids[role] = half.of("centroids", layer)
                args.k_feedback = plan.roles[0].of("feedback", layer)
                run("append", args)
        return body, own, refused

    def from_pages(self, body: Tensor, own: Own, stored: Stored, rows: Tensor) -> None:
        """Fills rows from pages, and centers and scales."""
        plan, layout = self._plan(stored), stored.layout
        whole = layout._replace(
            shape=(*layout.shape[:2], layout.n_blocks * PAGE_TOKENS, layout.row)
        )
        out = rows if whole == layout and rows.is_contiguous() else rows.new_empty(whole.shape)
        per_layer = plan.per_layer
        with calls(self.device) as run:
            for role, half in enumerate(plan.roles):
                args = s.CudaDecodeArgs.new(
                    codec=half.codec.handle,
                    blocks=plan.blocks.data_ptr(),
                    n_blocks=layout.n_blocks * (1 if per_layer else layout.n_layers),
                    n_kv_heads=layout.n_kv_heads,
                    type=type_of(out),
                    token_stride=layout.row,
                    head_stride=layout.head_stride,
                )
                for layer in range(layout.n_layers if per_layer else 1):
                    args.pages = _pages(body, stored, role, layer)
                    args.out = _row(out, whole, role, layer)
                    args.center = half.of("center", layer, own[role][0])
                    args.scale = half.of("scale", layer, own[role][1])
                    args.inverse_key_transform = half.of("inverse_key_transform", layer)
                    args.centroids = half.of("centroids", layer)
                    run("decode", args)
        if out is not rows:
            rows.copy_(out[:, :, : layout.n_tokens])

    @staticmethod
    def _own_state(rows: Tensor, stored: Stored, plan: _Plan) -> Own:
        """Centers and scales of the chunk, per role."""
        layout, own = stored.layout, []
        some = rows.index_select(2, plan.sample) if any(map(any, stored.own)) else None
        for role, wanted in enumerate(stored.own):
            found: list[Tensor] = []
            if some is not None and any(wanted):
                heads = some.view(*some.shape[:3], layout.n_kv_heads, layout.head_stride)
                plane = (
                    heads[-1, ..., -layout.head_dim :] if role else heads[0, ..., : layout.head_dim]
                )
                found = state.of(torch, plane.float(), *wanted)
            rest = iter(found)
            own.append([next(rest).contiguous() if want else None for want in wanted])
        return own

    def _plan(self, stored: Stored) -> _Plan:
        key = stored.layout, stored.fingerprint
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = self._make_plan(stored)
        return found

    def _make_plan(self, stored: Stored) -> _Plan:
        layout = stored.layout
        roles = self._role(stored, 0), self._role(stored, 1)
        tokens = torch.arange(layout.n_tokens, dtype=torch.int64, device="cpu")
        first = torch.arange(layout.n_layers, dtype=torch.int64, device="cpu") * (
            layout.n_blocks * PAGE_TOKENS
        )
        per_layer = any(map(any, stored.own)) or any(role.numbers.any for role in roles)
        return _Plan(
            roles,
            (first[:, None] + tokens).reshape(-1).to(self.device),
            torch.arange(layout.n_layers * layout.n_blocks, dtype=torch.int32, device="cpu").to(
                self.device
            ),
            torch.tensor(state.sample(layout.n_tokens), device="cpu").to(self.device),
            per_layer,
        )

    def _role(self, stored: Stored, role: int) -> _Role:
        codecs = [layer[role] for layer in stored.codecs]
        if any(codec.spec != codecs[0][0].spec for layer in codecs for codec in layer):
            raise Error(
                "codecs", 30, "a GPU needs equal specs in all layers: choose the device cpu"
            )
        return _Role(GpuCodec.of(codecs[0][0]), Numbers(codecs, self.device))


def _of_role(pages: np.ndarray, stored: Stored, layer: int, role: int) -> list[np.ndarray]:
    """The pages of each block of a layer and role."""
    heads, (k, v) = stored.layout.n_kv_heads, stored.page_sizes
    blocks = pages.reshape(stored.layout.n_layers, stored.layout.n_blocks, stored.block_size)
    return [block[heads * k :] if role else block[: heads * k] for block in blocks[layer]]


def _pages(body: Tensor, stored: Stored, role: int, layer: int = 0) -> s.CudaPages:
    k, v = stored.page_sizes
    first = layer * stored.layout.n_blocks * stored.block_size + (
        role and stored.layout.n_kv_heads * k
    )
    return s.CudaPages(body.data_ptr() + first, stored.block_size, v if role else k)


def _row(rows: Tensor, layout: Layout, role: int, layer: int) -> int:
    """The first row of a role and layer in rows of this layout."""
    plane = rows.stride(0) if role and rows.shape[0] == 2 else 0
    within = layout.head_dim if role and rows.shape[0] == 1 else 0
    return (
        rows.data_ptr()
        + (plane + within + layer * layout.n_tokens * layout.row) * rows.element_size()
    )
