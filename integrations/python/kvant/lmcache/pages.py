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

from .. import structs as s
from ..arrays import np
from ..library import PAGE_TOKENS, check, library
from . import container, state
from .stored import Stored

_SERIAL = 32767  # numbers that PyTorch converts in the calling thread


class CpuPages:
    """`workers`: threads. Any number of callers may use an object of this class at once."""

    def __init__(self, workers: int) -> None:
        self._workers, self._pool = workers, ThreadPoolExecutor(workers, "kvant-lmcache")
        self._mine = threading.local()

    def close(self) -> None:
        self._pool.shutdown()

    def encode(self, source: Tensor, stored: Stored, body: np.ndarray) -> np.ndarray:
        """Writes all of body, uint8, and returns its sums. kvant.Error for rows that the codecs
        refuse."""
        body[: stored.state_size] = 0
        self._each(stored, body, lambda *part: self._encode_layer(source, stored, *part))
        return container.sums(body)

    @staticmethod
    def load(body: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The input of decode, and the sums of body."""
        return body, container.sums(body)

    def decode(self, body: np.ndarray, stored: Stored, target: Tensor) -> None:
        self._each(stored, body, lambda *part: self._decode_layer(target, stored, *part))

    def _each(self, stored: Stored, body: np.ndarray, work: Callable[..., None]) -> None:
        """Calls work(layer, its blocks [n, bytes], its centers and scales) for all layers."""
        layout = stored.layout
        pages = body[stored.state_size :].reshape(
            layout.n_layers, layout.n_blocks, stored.block_size
        )
        states = (
            body[: 2 * math.prod(stored.state_shape)].view(np.float16).reshape(stored.state_shape)
        )

        def some(first: int, last: int) -> None:
            for layer in range(first, last):
                work(layer, pages[layer], states[layer])

        n = layout.n_layers
        steps = min(n, self._workers)
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
            self._mine.rows, self._mine.shape = (
                torch.empty(shape, dtype=torch.float32, device="cpu"),
                shape,
            )
        return self._mine.rows

    def _encode_layer(
        self, source: Tensor, stored: Stored, layer: int, blocks: np.ndarray, states: np.ndarray
    ) -> None:
        layout, rows = stored.layout, self._rows(len(source), stored.layout.row)
        if states.size:
            _convert(source[:, layer, state.sample(layout.n_tokens)], rows)
            states[:] = _own_states(rows.numpy(), stored)
        encode, at = library().kvant_codec_encode, rows.data_ptr()
        heads = list(_heads(stored, layer, states))
        for first, block in zip(range(0, layout.n_tokens, PAGE_TOKENS), blocks):
            here = source[:, layer, first : first + PAGE_TOKENS]
            _convert(here, rows)
            block[:] = 0
            pages = block.ctypes.data
            for codec, affine, offset, page in heads:
                status = encode(
                    codec, affine, at + offset, layout.row, 0, here.shape[1], pages + page
                )
                if status:
                    check(f"layer {layer}", status)

    def _decode_layer(
        self, target: Tensor, stored: Stored, layer: int, blocks: np.ndarray, states: np.ndarray
    ) -> None:
        layout, rows = stored.layout, self._rows(len(target), stored.layout.row)
        decode, at = library().kvant_codec_decode, rows.data_ptr()
        heads = list(_heads(stored, layer, states))
        for first, block in zip(range(0, layout.n_tokens, PAGE_TOKENS), blocks):
            there = target[:, layer, first : first + PAGE_TOKENS]
            pages = block.ctypes.data
            for codec, affine, offset, page in heads:
                status = decode(
                    codec, affine, pages + page, 0, there.shape[1], at + offset, layout.row
                )
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


def _own_states(rows: np.ndarray, stored: Stored) -> list[np.ndarray]:
    """Centers and scales from the sampled rows of a layer, [1 or 2, 64, row]."""
    layout, made = stored.layout, []
    for role, wanted in enumerate(stored.own):
        if any(wanted):
            heads = rows[-1 if role else 0].reshape(
                state.SAMPLES, layout.n_kv_heads, layout.head_stride
            )
            first = layout.head_stride - layout.head_dim if role else 0
            made += state.of(np, heads[..., first : first + layout.head_dim], *wanted)
    return made


def _heads(stored: Stored, layer: int, states: np.ndarray) -> Iterator[tuple[Any, Any, int, int]]:
    """Yields for each kv head, keys first: codec, affine, and the offsets in bytes of its rows in a
    block and of its page."""
    layout, rest = stored.layout, iter(states.astype(np.float32))
    own = [[next(rest) if want else None for want in wanted] for wanted in stored.own]
    for place in stored.places[layer]:
        center, scale = (x if x is None else x[place.head].ctypes.data for x in own[place.role])
        affine = s.Affine(center or place.center, scale or place.scale)
        affine.keep = own
        offset = layout.role_offset(place.role, PAGE_TOKENS) + place.head * layout.head_stride
        yield place.codec, c.byref(affine), 4 * offset, place.page
