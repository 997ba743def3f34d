#!/usr/bin/env python3
"""Writes a GGUF model with its weights in another type.

    tests/converted_model.py MODEL OUT.gguf f16|q8_0 LIBGGML_BASE

llama.cpp multiplies batches by q8_0 with a matrix kernel and by q4_1 row by row, so tests take a
third of the time with a model in q8_0. Its weights are as good as the original's. With f16, 8-bit
activations hide no small effect.
"""

import ctypes
import math
import os
import pathlib
import struct
import sys

from small_model import Reader, aligned, pairs_of, tensors

F32 = 0
TYPES = {"f16": (1, 1), "q8_0": (8, 7)}  # ggml's type, llama.cpp's type of a file
FILE_TYPE = b"general.file_type"


class Traits(ctypes.Structure):
    """The first fields of ggml_type_traits."""

    to_floats = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleaved", ctypes.c_int64),
        ("bytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", to_floats),
    ]


class Converter:
    def __init__(self, library, name):
        self.ggml = ctypes.CDLL(str(library))
        self.ggml.ggml_get_type_traits.restype = ctypes.POINTER(Traits)
        self.ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
        self.type, self.file_type = TYPES[name]

    def kept(self, kind):
        """fp32 weights stay, because llama.cpp needs norms in fp32."""
        return kind in (F32, self.type)

    def weights(self, kind, row, n, data):
        """Returns n weights of a matrix with rows of this length."""
        traits = self.ggml.ggml_get_type_traits(kind).contents
        floats, out = (ctypes.create_string_buffer(4 * n) for _ in range(2))
        traits.to_float(
            ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p), ctypes.addressof(floats), n
        )
        size = self.ggml.ggml_quantize_chunk(
            self.type, floats, out, *map(ctypes.c_int64, (0, n // row, row)), None
        )
        return out.raw[:size]

    def tensor(self, shape, data):
        """(dimensions and type, weights) of a tensor."""
        *dims, kind = struct.unpack(f"<{(len(shape) - 8) // 8}QI", shape[4:])
        traits = self.ggml.ggml_get_type_traits(kind).contents
        n = math.prod(dims)
        data = data[: n // traits.block * traits.bytes]  # the last tensor has the file's end
        if self.kept(kind):
            return shape, data
        return shape[:-4] + struct.pack("<I", self.type), self.weights(kind, dims[0], n, data)

    def metadata(self, reader, n):
        for key, before, value in pairs_of(reader, n):
            yield before + (struct.pack("<I", self.file_type) if key == FILE_TYPE else value)

    def model(self, data, out):
        reader = Reader(data)
        reader.at = 4
        version, n_tensors, n_pairs = reader.number("I"), reader.number("Q"), reader.number("Q")
        head = data[:4] + struct.pack("<IQQ", version, n_tensors, n_pairs)
        head += b"".join(self.metadata(reader, n_pairs))
        found, base = tensors(reader, n_tensors)
        body = bytearray()
        for name, shape, offset, size in found:
            shape, weights = self.tensor(shape, data[base + offset : base + offset + size])
            head += struct.pack("<Q", len(name)) + name + shape + struct.pack("<Q", len(body))
            body += weights + bytes(aligned(len(weights)) - len(weights))
        out.write(head + bytes(aligned(len(head)) - len(head)) + body)


def main():
    if len(sys.argv) != 5 or sys.argv[3] not in TYPES:
        sys.exit("usage: converted_model.py MODEL OUT.gguf f16|q8_0 LIBGGML_BASE")
    model, path = map(pathlib.Path, sys.argv[1:3])
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as out:
        Converter(sys.argv[4], sys.argv[3]).model(model.read_bytes(), out)
    os.replace(part, path)


if __name__ == "__main__":
    main()
