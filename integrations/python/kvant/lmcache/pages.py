"""Rows to pages and back on the CPU. Threads share the layers of an object; ctypes gives up Python's lock while they compute."""

from __future__ import annotations

import ctypes as c
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

import torch
from torch import Tensor

from .. import arrays
from .. import structs as s
from ..arrays import np
from ..library import PAGE_TOKENS, check, library
from . import state
from .layout import Layout
from .stored import Stored

_SERIAL = 32767  # numbers that PyTorch converts in the calling thread


def fixed(codec: Any) -> s.CudaTables:
    """The numbers that a calibration gives a codec, which owns them."""
    found = s.CudaTables.new()
    check("tables", library().kvant_cuda_codec_tables(codec.handle, c.byref(found)))
    return found


class CpuPages:
    def __init__(self, workers: int) -> None:
        self._workers, self._pool = workers, ThreadPoolExecutor(workers, "kvant-lmcache")
        self._mine = threading.local()

    def close(self) -> None:
        self._pool.shutdown()

    def encode(self, source: Tensor, stored: Stored, body: np.ndarray) -> None:
        """Writes all of body, uint8. kvant.Error for rows that the codecs refuse."""
        self._each(stored, lambda layer, part, states: self._encode_layer(layer, source, stored, part, states), body)

    def decode(self, body: np.ndarray, stored: Stored, target: Tensor) -> None:
        self._each(stored, lambda layer, part, states: self._decode_layer(layer, part, stored, target, states), body)

    def _each(self, stored: Stored, work: Callable[..., None], body: np.ndarray) -> None:
        """work(layer, its bytes, its centers and scales) for all layers."""
        size = stored.layout.n_blocks * stored.block_bytes
        pages = body[stored.state_bytes :].reshape(-1, size)
        count = int(np.prod(stored.state_shape))
        states = body[: stored.state_bytes].view(np.float16)[:count].reshape(stored.state_shape)
        if count % 32:
            body[2 * count : stored.state_bytes] = 0

        def some(first: int, last: int) -> None:
            for layer in range(first, last):
                work(layer, pages[layer], states[layer])

        n = stored.layout.n_layers
        steps = min(n, self._workers)
        if steps == 1:
            some(0, n)
            return
        futures = [self._pool.submit(some, i * n // steps, (i + 1) * n // steps) for i in range(steps)]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        if errors:
            raise errors[0]

    def _rows(self, shape: tuple[int, ...]) -> Tensor:
        """This thread's float32 rows of a layer."""
        if getattr(self._mine, "shape", None) != shape:
            self._mine.rows, self._mine.shape = torch.empty(shape, dtype=torch.float32), shape
        return self._mine.rows

    def _encode_layer(self, layer: int, source: Tensor, stored: Stored, part: np.ndarray, states: np.ndarray) -> None:
        layout, rows = stored.layout, self._rows((source.shape[0], *source.shape[2:]))
        _convert(source[:, layer], rows)
        n = 0
        for role, wanted in enumerate(stored.parts):
            if any(wanted):
                made = state.of(np, _sampled(rows.numpy(), layout, role), *wanted)
                states[n : n + len(made)] = made
                n += len(made)
        part[:] = 0
        encode, strides = library().kvant_codec_encode, 4 * layout.row
        for codec, affine, address, pages in _heads(layer, stored, rows, part, states):
            for block in range(layout.n_blocks):
                first = PAGE_TOKENS * block
                tokens = min(PAGE_TOKENS, layout.n_tokens - first)
                status = encode(codec, affine, address + strides * first, layout.row, 0, tokens, pages + block * stored.block_bytes)
                if status:
                    check(f"layer {layer}", status)

    def _decode_layer(self, layer: int, part: np.ndarray, stored: Stored, target: Tensor, states: np.ndarray) -> None:
        layout, rows = stored.layout, self._rows((target.shape[0], *target.shape[2:]))
        decode, strides = library().kvant_codec_decode, 4 * layout.row
        for codec, affine, address, pages in _heads(layer, stored, rows, part, states):
            for block in range(layout.n_blocks):
                first = PAGE_TOKENS * block
                tokens = min(PAGE_TOKENS, layout.n_tokens - first)
                status = decode(codec, affine, pages + block * stored.block_bytes, 0, tokens, address + strides * first, layout.row)
                if status:
                    check(f"layer {layer}", status)
        _convert(rows, target[:, layer])


def _convert(source: Tensor, target: Tensor) -> None:
    """[1 or 2, tokens, row], without PyTorch's threads."""
    step = max(1, _SERIAL // source.shape[2])
    for plane in range(source.shape[0]):
        for first in range(0, source.shape[1], step):
            target[plane, first : first + step].copy_(source[plane, first : first + step])


def _sampled(rows: np.ndarray, layout: Layout, role: int) -> np.ndarray:
    flat = rows.reshape(-1)[layout.role_offset(role) :][: layout.n_tokens * layout.row - (layout.head_stride - layout.head_dim) * role]
    strides = 4 * layout.row, 4 * layout.head_stride, 4
    shape = layout.n_tokens, layout.n_kv_heads, layout.head_dim
    return np.lib.stride_tricks.as_strided(flat, shape, strides)[state.sample(layout.n_tokens)]


def _heads(layer: int, stored: Stored, rows: Tensor, part: np.ndarray, states: np.ndarray) -> Any:
    """Per role and kv head: codec, affine, address of its first row, and of its first page."""
    layout, first_page, n = stored.layout, part.ctypes.data, 0
    own = states.astype(np.float32)
    for role, wanted in enumerate(stored.parts):
        here: list[np.ndarray | None] = [None, None]
        for i in (0, 1):
            if wanted[i]:
                here[i], n = own[n], n + 1
        for head, codec in enumerate(stored.codecs[layer][role]):
            tables = fixed(codec)
            center, scale = (arrays.pointer(x if x is None else x[head]) for x in here)
            affine = s.Affine(center or tables.center, scale or tables.scale)
            at = rows.data_ptr() + 4 * (layout.role_offset(role) + head * layout.head_stride)
            yield codec.handle, c.byref(affine), at, first_page + head * stored.page_bytes[role]
        first_page += layout.n_kv_heads * stored.page_bytes[0]
