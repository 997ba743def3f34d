#!/usr/bin/env python3
"""Writes a GGUF model with its weights in fp16, for tests in which the 8-bit activations of
quantised weights would hide the effect.

    tests/integration/float_model.py MODEL OUT.gguf LIBGGML_BASE
"""

import ctypes
import math
import os
import pathlib
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from small_model import Reader, aligned, tensors  # noqa: E402

F32, F16 = 0, 1
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


def halves(ggml, kind, n, data):
    """Returns n weights as fp16. fp32 weights stay, because llama.cpp needs norms in fp32."""
    if kind in (F32, F16):
        return data[: n * (4 if kind == F32 else 2)]
    traits = ggml.ggml_get_type_traits(kind).contents
    floats, out = ctypes.create_string_buffer(4 * n), ctypes.create_string_buffer(2 * n)
    traits.to_float(
        ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p), ctypes.addressof(floats), n
    )
    ggml.ggml_fp32_to_fp16_row(floats, out, ctypes.c_int64(n))
    return out.raw


def metadata(reader, n):
    for _ in range(n):
        start = reader.at
        key, kind = reader.string(), reader.number("I")
        value = reader.at
        reader.skip_value(kind)
        yield (
            reader.data[start:value] + struct.pack("<I", F16)
            if key == FILE_TYPE
            else reader.data[start : reader.at]
        )


def convert(data, ggml, out):
    reader = Reader(data)
    reader.at = 4
    version, n_tensors, n_pairs = reader.number("I"), reader.number("Q"), reader.number("Q")
    pairs = b"".join(metadata(reader, n_pairs))
    found, base = tensors(reader, n_tensors)
    infos, body = b"", bytearray()
    for name, shape, offset, size in found:
        (kind,) = struct.unpack_from("<I", shape, len(shape) - 4)
        n = math.prod(struct.unpack(f"<{(len(shape) - 8) // 8}Q", shape[4:-4]))
        infos += (
            struct.pack("<Q", len(name))
            + name
            + shape[:-4]
            + struct.pack("<IQ", min(kind, F16), len(body))
        )
        weights = halves(ggml, kind, n, data[base + offset : base + offset + size])
        body += weights + bytes(aligned(len(weights)) - len(weights))
    head = data[:4] + struct.pack("<IQQ", version, n_tensors, n_pairs) + pairs + infos
    out.write(head + bytes(aligned(len(head)) - len(head)) + body)


def main():
    model, path, library = map(pathlib.Path, sys.argv[1:])
    ggml = ctypes.CDLL(str(library))
    ggml.ggml_get_type_traits.restype = ctypes.POINTER(Traits)
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as out:
        convert(model.read_bytes(), ggml, out)
    os.replace(part, path)


if __name__ == "__main__":
    main()
