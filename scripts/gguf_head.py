"""The head of a GGUF file: metadata and where tensors lie. For the models that tests and benchmarks
make; nothing here reads one."""

import math
import struct

F32, Q4_0 = 0, 2
_BLOCKS = {F32: (1, 4), Q4_0: (32, 18)}  # numbers, bytes


def _text(string):
    return struct.pack("<Q", len(string)) + string.encode()


def _value(v):
    if isinstance(v, str):
        return struct.pack("<I", 8) + _text(v)
    if isinstance(v, float):
        return struct.pack("<If", 6, v)
    if isinstance(v, list):
        return struct.pack("<IIQ", 9, 5, len(v)) + struct.pack(f"<{len(v)}i", *v)
    return struct.pack("<II", 4, v)


def size(dims, kind):
    """Bytes of a tensor, padded as the file wants it."""
    numbers, n_bytes = _BLOCKS[kind]
    n = math.prod(dims) // numbers * n_bytes
    return n + -n % 32


def head(pairs, tensors):
    """The bytes before the first tensor. tensors: (name, dims, kind), as their data follow, each
    padded to 32 bytes."""
    made = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(pairs))
    made += b"".join(_text(key) + _value(value) for key, value in pairs.items())
    at = 0
    for name, dims, kind in tensors:
        made += _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, at)
        at += size(dims, kind)
    return made + bytes(-len(made) % 32)
