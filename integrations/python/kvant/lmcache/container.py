"""The bytes of an object: for each of its tensors a header of 256 bytes and a body.

    offset  bytes
         0      8  KVNTLMC1
         8      4  256
        12      4  0: the tensor's bytes unchanged, 1: fused, 2: split (layout.py)
        16      8  bytes of header and body, a multiple of 64
        24     16  layers, tokens, kv heads, head_dim
        40      8  codecs: hash of all fingerprints, which cover specs and a calibration's numbers
        48     16  key: hash of model, its revision, rank, group, salt and chunk
        64      8  checksum
        72      4  dtype of the tensor: its index in layout.DTYPES, or 255
        76    180  specs of keys and values, for people

Numbers are little-endian. A body has the centers and scales of chunks as fp16 (state.py), padded to
64 bytes. The pages follow (docs/reference/format.md), layer by layer and block by block: keys of
all kv heads, then values of all kv heads.

A reader knows every field of the header that it expects, so it compares bytes. It uses nothing of
an object before it has verified the checksum. A GPU writes 30 GB/s of checksums, so the checksum is
linear in words of 64 bits. For each 512 words x it is the sum of w[j] (x[j] ^ x[j] >> 32) mod 2^64.
Every w is odd, so no change of a single word is missed. BLAKE2b of the header and these sums
follows."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

from ..arrays import np
from .layout import DTYPES, Layout

HEADER = 256
MAGIC = b"KVNTLMC1"
_FIELDS = struct.Struct("<8sIIQIIIIQ16sQI")
_CHECKSUM = slice(64, 72)
_WORDS = 512


def _weights() -> np.ndarray:
    made, state, mask = [], 0, 2**64 - 1
    for _ in range(_WORDS):  # splitmix64
        state = state + 0x9E3779B97F4A7C15 & mask
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        made.append(z ^ z >> 31 | 1)
    return np.array(made, np.uint64)


WEIGHTS = _weights()


class Damaged(ValueError):
    """An object has other bytes than the reader expects; LMCache treats it as a miss."""


def digest(*parts: Any, size: int) -> bytes:
    """A hash of numbers, texts and bytes."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=size).digest()


def header(part: Layout, size: int, codecs: int, key: bytes, specs: str) -> bytes:
    """The header with 0 as its checksum."""
    shape = part.n_layers, part.n_tokens, part.n_kv_heads, part.head_dim
    dtype = DTYPES.index(part.dtype) if part.dtype in DTYPES else 255
    fixed = _FIELDS.pack(MAGIC, HEADER, part.kind, size, *shape, codecs, key, 0, dtype)
    return (fixed + specs.encode()[: HEADER - len(fixed)]).ljust(HEADER, b"\0")


def sums(body: np.ndarray) -> np.ndarray:
    """The sums of every 512 words of a body on the CPU: int64."""
    words, made = body.view(np.uint64), []
    for first in range(0, len(words), _WORDS * 256):  # fits into the cache of a core
        some = words[first : first + _WORDS * 256]
        mixed = some >> np.uint64(32)
        mixed ^= some
        whole = len(some) // _WORDS * _WORDS
        made.append(np.einsum("pj,j->p", mixed[:whole].reshape(-1, _WORDS), WEIGHTS))
        if whole < len(some):
            made.append(np.einsum("j,j->", mixed[whole:], WEIGHTS[: len(some) - whole]).reshape(1))
    return np.concatenate(made).view(np.int64)


def sign(expected: bytes, found: np.ndarray) -> bytes:
    """The header with its checksum. `found`: sums of the body."""
    checksum = hashlib.blake2b(expected + found.tobytes(), digest_size=8).digest()
    return expected[: _CHECKSUM.start] + checksum + expected[_CHECKSUM.stop :]


def check(found: bytes, expected: bytes) -> None:
    """Compares headers without their checksums. Damaged says which field differs."""
    if found[: _CHECKSUM.start] + bytes(8) + found[_CHECKSUM.stop :] == expected:
        return
    if found[:8] != MAGIC:
        raise Damaged("it is not an object of this version of kvant")
    names = (
        "",
        "header",
        "layout",
        "bytes",
        "layers",
        "tokens",
        "kv heads",
        "head_dim",
        "codecs",
        "model, rank or chunk",
        "",
        "dtype",
    )
    pairs = zip(names, _FIELDS.unpack_from(found), _FIELDS.unpack_from(expected))
    wrong = ", ".join(name for name, a, b in pairs if name and a != b)
    specs = (
        ""
        if found[_FIELDS.size :] == expected[_FIELDS.size :]
        else f": {_specs(found)}, not {_specs(expected)}"
    )
    raise Damaged(f"it has other {wrong or 'specs'} than expected{specs}")


def check_sums(found: bytes, expected: bytes, of_body: np.ndarray) -> None:
    if sign(expected, of_body) != found:
        raise Damaged("its checksum does not match")


def _specs(of: bytes) -> str:
    return of[_FIELDS.size :].rstrip(b"\0").decode(errors="replace")
