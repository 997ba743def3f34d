"""Rows to pages and back on the CPU. Threads share the layers of an object; ctypes releases
Python's lock while they compute."""

from __future__ import annotations

import ctypes as c
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Iterator

import torch
from torch import Tensor

from .. import arrays
from .. import structs as s
from ..arrays import np
from ..library import PAGE_TOKENS, check, library
from . import state
from .records import Found
from .stored import Stored

_SERIAL = 32767  # numbers that PyTorch converts in the calling thread


class CpuPages:
    """`workers`: threads. Any number of callers may use an object of this class at once."""

    def __init__(self, workers: int) -> None:
        self._workers, self._pool = workers, ThreadPoolExecutor(workers, "kvant-lmcache")
        self._mine = threading.local()

    def close(self) -> None:
        self._pool.shutdown()

    def encode(self, source: Tensor, stored: Stored, body: np.ndarray) -> None:
        """Writes all of body, uint8. kvant.Error for rows that the codecs refuse."""
        self.each(stored, lambda layer: self._encode_layer(source, stored, body, layer))

    def load(self, body: np.ndarray, stored: Stored) -> list[list[Found]]:
        """The input of decode: the checked records of a body, which stay in it. Damaged or
        kvant.Error."""
        found: list[list[Found]] = [[] for _ in range(stored.layout.n_layers)]

        def read(layer: int) -> None:
            found[layer] = [stored.records.read(body, layer, role) for role in (0, 1)]

        self.each(stored, read)
        return found

    def decode(self, found: list[list[Found]], stored: Stored, target: Tensor) -> None:
        self.each(stored, lambda layer: self._decode_layer(target, stored, found[layer], layer))

    def each(self, stored: Stored, work: Callable[[int], None]) -> None:
        """Calls work(layer) for all layers, in the object's threads."""
        n = stored.layout.n_layers
        steps = min(n, self._workers)

        def some(first: int, last: int) -> None:
            for layer in range(first, last):
                work(layer)

        if steps == 1:
            some(0, n)
            return
        futures = [
            self._pool.submit(some, i * n // steps, (i + 1) * n // steps) for i in range(steps)
        ]
        errors = [future.exception() for future in futures]
        for error in filter(None, errors):
            raise error

    def _rows(self, planes: int, row: int) -> Tensor:
        """This thread's float32 rows of a block, which fit into the cache of a core."""
        shape = planes, PAGE_TOKENS, row
        if getattr(self._mine, "shape", None) != shape:
            self._mine.rows = torch.empty(shape, dtype=torch.float32, device="cpu")
            self._mine.shape = shape
        return self._mine.rows

    def _pages(self, stored: Stored) -> np.ndarray:
        """This thread's memory for the pages of a layer, [2, blocks, bytes of a role]."""
        shape = 2, stored.layout.n_blocks, stored.layout.n_kv_heads * max(stored.page_sizes)
        if getattr(self._mine, "pages_shape", None) != shape:
            self._mine.pages = arrays.zeroed(math.prod(shape)).reshape(shape)
            self._mine.pages_shape = shape
        return self._mine.pages

    def _encode_layer(self, source: Tensor, stored: Stored, body: np.ndarray, layer: int) -> None:
        layout, rows = stored.layout, self._rows(len(source), stored.layout.row)
        own = [[None, None], [None, None]]
        if any(map(any, stored.own)):
            _convert(source[:, layer, state.sample(layout.n_tokens)], rows)
            own = _own_states(rows.numpy(), stored)
        encode, at, pages = library().kvant_codec_encode, rows.data_ptr(), self._pages(stored)
        pages[:] = 0
        heads = list(_heads(stored, layer, own))
        for i, first in enumerate(range(0, layout.n_tokens, PAGE_TOKENS)):
            here = source[:, layer, first : first + PAGE_TOKENS]
            _convert(here, rows)
            for codec, affine, role, offset, page in heads:
                to = pages[role, i].ctypes.data + page
                status = encode(codec, affine, at + offset, layout.row, 0, here.shape[1], to)
                if status:
                    check(f"layer {layer}", status)
        for role, size in enumerate(stored.page_sizes):
            made = (block[: layout.n_kv_heads * size] for block in pages[role])
            stored.records.write(body, layer, role, own[role], made)

    def _decode_layer(self, target: Tensor, stored: Stored, found: list[Found], layer: int) -> None:
        layout, rows = stored.layout, self._rows(len(target), stored.layout.row)
        decode, at, pages = library().kvant_codec_decode, rows.data_ptr(), self._pages(stored)
        heads = list(_heads(stored, layer, [[of.center, of.scale] for of in found]))
        sizes = [layout.n_kv_heads * size for size in stored.page_sizes]
        for i, first in enumerate(range(0, layout.n_tokens, PAGE_TOKENS)):
            there = target[:, layer, first : first + PAGE_TOKENS]
            for role, of in enumerate(found):
                c.memmove(pages[role, i].ctypes.data, of.codes[i], sizes[role])
            for codec, affine, role, offset, page in heads:
                here = pages[role, i].ctypes.data + page
                status = decode(codec, affine, here, 0, there.shape[1], at + offset, layout.row)
                if status:
                    check(f"layer {layer}", status)
            _convert(rows[:, : there.shape[1]], there)


def _convert(source: Tensor, target: Tensor) -> None:
    """Converts [1 or 2, tokens, row] without PyTorch's threads."""
    step = max(1, _SERIAL // source.shape[2])
    for plane in range(source.shape[0]):
        for first in range(0, source.shape[1], step):
            part = source[plane, first : first + step]
            target[plane, first : first + len(part)].copy_(part)


def _own_states(rows: np.ndarray, stored: Stored) -> list[list[np.ndarray | None]]:
    """For each role the center and the scale, from the sampled rows of a layer, [1 or 2, 64,
    row]."""
    layout, made = stored.layout, []
    for role, wanted in enumerate(stored.own):
        if not any(wanted):
            made.append([None, None])
            continue
        heads = rows[-1 if role else 0].reshape(
            state.SAMPLES, layout.n_kv_heads, layout.head_stride
        )
        first = layout.head_stride - layout.head_dim if role else 0
        rest = iter(state.of(np, heads[..., first : first + layout.head_dim], *wanted))
        made.append([next(rest) if want else None for want in wanted])
    return made


def _heads(
    stored: Stored, layer: int, own: list[list[np.ndarray | None]]
) -> Iterator[tuple[Any, Any, int, int, int]]:
    """Yields for each kv head, keys first: codec, affine, role, the offset in bytes of its rows in
    a block, and of its page among the role's pages. `own`: for each role the chunk's center and
    scale."""
    layout = stored.layout
    for place in stored.places[layer]:
        center, scale = (x if x is None else x[place.head].ctypes.data for x in own[place.role])
        affine = s.Affine(center or place.center, scale or place.scale)
        affine.keep = own
        offset = layout.role_offset(place.role, PAGE_TOKENS) + place.head * layout.head_stride
        yield place.codec, c.byref(affine), place.role, 4 * offset, place.page
