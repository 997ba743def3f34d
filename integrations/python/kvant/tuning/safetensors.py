"""Reads files of named tensors in the safetensors format (github.com/huggingface/safetensors): 8
bytes with the header's length, little endian, a JSON header, then the tensors' bytes.

Trusts no length. It refuses a file that is cut short with a Damaged that names the file. It also
refuses a file whose tensors overlap, leave holes or do not have the bytes of their shapes."""

from __future__ import annotations

import contextlib
import json
import os
from typing import NamedTuple

import numpy as np

MAX_HEADER = 100 << 20  # as the reference implementation has it
MAX_DIMS = 8
TYPES = {
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I32": np.dtype("<i4"),
}


class Damaged(ValueError):
    """The file's header or length is wrong. The message is one line and begins with the path."""


class Entry(NamedTuple):
    dtype: np.dtype
    shape: tuple
    offset: int  # behind the header


class File(contextlib.AbstractContextManager):
    """A file's header, checked; tensors are read when a caller asks for them. It is a context
    manager, too."""

    def __init__(self, path):
        self._path = os.fspath(path)
        self._file = open(path, "rb")  # noqa: SIM115 - closed by close()
        try:
            size = os.fstat(self._file.fileno()).st_size
            self.tensors, self.metadata = parse(self._header(size), size - self._data)
        except Damaged as error:
            self.close()
            raise Damaged(f"{self._path}: {error}") from None

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._file.close()

    def read(self, name):
        """The numbers of a tensor, in the order of the file."""
        dtype, shape, offset = self.tensors[name]
        self._file.seek(self._data + offset)
        count = int(np.prod(shape, dtype=object))
        numbers = np.fromfile(self._file, dtype, count)
        if numbers.size != count:
            raise Damaged(f"{self._path}: the file ends too early")
        return numbers.reshape(shape)

    def _header(self, size):
        length = int.from_bytes(self._file.read(8), "little")
        if size < 8:
            raise Damaged(f"not a safetensors file: it has {size} bytes")
        if length > min(MAX_HEADER, size - 8):
            raise Damaged(f"not a safetensors file, or cut short: a header of {length} bytes")
        self._data = 8 + length
        return self._file.read(length)


def parse(header, data_bytes):
    """{name: Entry} and the metadata of a header that data_bytes bytes follow."""
    try:
        found = (
            json.loads(header.decode(), object_pairs_hook=_members) if header[:1] == b"{" else None
        )
    except (ValueError, RecursionError) as error:
        if isinstance(error, Damaged):
            raise
        found = None
    if not isinstance(found, dict):
        raise Damaged("the header is not a JSON object")
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(text, str) for text in metadata.values()
    ):
        raise Damaged("__metadata__ is not an object of strings")
    entries = {name: _entry(name, entry) for name, entry in found.items()}
    _check_cover(entries, data_bytes)
    return {name: entry for name, (entry, _) in entries.items()}, metadata


def _members(pairs):
    members = dict(pairs)
    if len(members) != len(pairs):
        raise Damaged("two members of the header have one name")
    return members


def _is_size(number):
    return type(number) is int and 0 <= number < 2**63


def _entry(name, entry):
    """The Entry, and the offset of its end."""
    entry = entry if isinstance(entry, dict) else {}
    dtype = TYPES.get(entry["dtype"]) if isinstance(entry.get("dtype"), str) else None
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if dtype is None:
        raise Damaged(f"tensor {name!a:.64} has an unknown type")
    if not all(
        isinstance(sizes, list) and all(map(_is_size, sizes)) for sizes in (shape, offsets)
    ) or (len(shape) > MAX_DIMS or len(offsets) != 2):
        raise Damaged(f"tensor {name!a:.64}: shape or data_offsets are not lists of sizes")
    if int(np.prod(shape, dtype=object)) * dtype.itemsize != offsets[1] - offsets[0]:
        raise Damaged(f"tensor {name!a:.64}: its shape does not fit its number of bytes")
    return Entry(dtype, tuple(shape), offsets[0]), offsets[1]


def _check_cover(entries, data_bytes):
    at = 0
    for name, (entry, end) in sorted(
        entries.items(), key=lambda item: (item[1][0].offset, item[1][1])
    ):
        if entry.offset != at:
            raise Damaged(f"tensor {name!a:.64} overlaps another or leaves a hole")
        at = end
    if at != data_bytes:
        raise Damaged(
            f"{at} bytes of tensors are in the header, {data_bytes} in the file: it is cut short "
            "or damaged"
        )
