"""Objects of LMCache to bytes and back: LMCache's Serializer and Deserializer are thin classes
around this."""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor

from .. import arrays
from ..arrays import np
from ..library import Error, invoke
from . import container
from .container import HEADER, Damaged
from .layout import RAW, layout
from .options import Options
from .pages import CpuPages
from .stored import Codecs, Stored


class Serde:
    """Any number of threads may use an object of this class at once."""

    def __init__(self, options: Options) -> None:
        self.options, self._codecs = options, Codecs(options)
        self._cpu, self._gpu = CpuPages(options.workers), None
        if options.device != "cpu":
            from .gpu import GpuPages

            invoke(f"device {options.device!r}", "kvant_cuda_available")
            self._gpu = GpuPages(options.device, self._cpu.each)

    def close(self) -> None:
        self._cpu.close()

    def _pages(self, stored: Stored) -> Any:
        """The object that runs the codecs of stored, on the CPU or on a GPU."""
        return self._gpu if self._gpu is not None and self._gpu.takes(stored) else self._cpu

    def _stored(
        self, shapes: Sequence[Any], dtypes: Sequence[Any], kv_rank: int = 0
    ) -> list[Stored]:
        return [
            self._codecs.of(layout(shape, dtype, self.options.head_dim), kv_rank)
            for shape, dtype in zip(shapes, dtypes)
        ]

    def size(self, shapes: Sequence[Any], dtypes: Sequence[Any]) -> int:
        """Bytes of an object, exactly."""
        return sum(stored.size for stored in self._stored(shapes, dtypes))

    def _parts(self, tensors: Sequence[Tensor], key: Any) -> Any:
        """For each tensor its Stored, its header and its offset."""
        first = 0
        for i, stored in enumerate(
            self._stored([x.shape for x in tensors], [x.dtype for x in tensors], key.kv_rank)
        ):
            yield stored, stored.header(self._name(key, i)), first
            first += stored.size

    def _name(self, key: Any, part: int) -> bytes:
        of_key = key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, key.chunk_hash
        return container.digest(self.options.model, of_key, part, size=16)

    def encode(self, tensors: Sequence[Tensor], data: np.ndarray, key: Any) -> int:
        """Writes the object of these tensors to data, uint8, and returns how many bytes it has.
        ValueError when data is too small; kvant.Error for a NaN, an infinity or a row that no scale
        fits; the object is then not stored."""
        end = 0
        for (stored, expected, first), tensor in zip(self._parts(tensors, key), tensors):
            end = first + stored.size
            if end > data.size:
                raise ValueError(f"{data.size} bytes are too few for an object of {end} or more")
            self._encode(tensor, stored, expected, data[first:end])
        return end

    def _encode(self, tensor: Tensor, stored: Stored, expected: bytes, data: np.ndarray) -> None:
        body = data[HEADER:]
        if stored.layout.kind == RAW:
            body[stored.layout.bytes :] = 0
            body[: stored.layout.bytes] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        else:
            self._pages(stored).encode(tensor, stored, body)
        data[:HEADER] = np.frombuffer(container.sign(expected, _sums(stored, body)), np.uint8)

    def decode(self, data: np.ndarray, tensors: Sequence[Tensor], key: Any) -> None:
        """Fills the tensors from an object. Damaged, with nothing written, unless encode made these
        bytes with these options for this key."""
        parts = list(zip(self._parts(tensors, key), tensors))
        checked = [
            self._checked(data[first : first + stored.size], stored, expected)
            for (stored, expected, first), _ in parts
        ]
        for ((stored, *_), tensor), held in zip(parts, checked):
            if stored.layout.kind == RAW:
                tensor.copy_(
                    torch.from_numpy(held[: stored.layout.bytes])
                    .view(tensor.dtype)
                    .view(tensor.shape)
                )
            else:
                self._pages(stored).decode(held, stored, tensor)

    def _checked(self, data: np.ndarray, stored: Stored, expected: bytes) -> Any:
        """The body of a part whose header and checksum are right, on the device where it is
        decoded."""
        if data.size < stored.size:
            raise Damaged(f"it has {data.size} bytes, not {stored.size}")
        found = data[:HEADER].tobytes()
        container.check(found, expected)
        body = data[HEADER:]
        container.check_sums(found, expected, _sums(stored, body))
        if stored.layout.kind == RAW:
            return _aligned(body)
        try:
            return self._pages(stored).load(body, stored)
        except Error as error:
            raise Damaged(error.reason) from None


def _sums(stored: Stored, body: np.ndarray) -> Any:
    """The bytes that the header's checksum covers in a body."""
    return body.data if stored.layout.kind == RAW else stored.records.checksums(body)


def _aligned(body: np.ndarray) -> np.ndarray:
    """A copy in memory that PyTorch accepts for any dtype."""
    made = arrays.zeroed(body.size)
    made[:] = body
    return made
