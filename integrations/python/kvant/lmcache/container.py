"""The bytes of an object: for each of its tensors a header of 256 bytes and a body.

    offset  bytes
         0      8  KVNTLMC2
         8      4  256
        12      4  0: the tensor's bytes unchanged, 1: fused, 2: split (layout.py)
        16      8  bytes of header and body, a multiple of 8
        24     16  layers, tokens, kv heads, head_dim
        40      8  codecs: hash of all fingerprints, which cover specs and a calibration's numbers
        48     16  key: hash of model, its revision, rank, group, salt and chunk
        64      8  checksum
        72      4  dtype of the tensor: its index in layout.DTYPES, or 255
        76    180  specs of keys and values, for people

Numbers are little-endian. A body has a record for the keys and a record for the values of each
layer (records.py), or the tensor's bytes and zeros up to a multiple of 8 bytes.

A reader knows every field of the header that it expects, so it compares bytes. It uses nothing of
an object before it has verified all checksums. The header's checksum is BLAKE2b of the header and
of the records' checksums, or of the tensor's bytes. Objects of older versions begin with KVNTLMC1
and are misses."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

from .layout import DTYPES, Layout

HEADER = 256
MAGIC = b"KVNTLMC2"
_FIELDS = struct.Struct("<8sIIQIIIIQ16sQI")
_CHECKSUM = slice(64, 72)


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


def sign(expected: bytes, of_body: Any) -> bytes:
    """The header with its checksum. `of_body`: the checksums of records, or a tensor's bytes."""
    made = hashlib.blake2b(expected, digest_size=8)
    made.update(of_body)
    checksum = made.digest()
    return expected[: _CHECKSUM.start] + checksum + expected[_CHECKSUM.stop :]


def check(found: bytes, expected: bytes) -> None:
    """Compares headers without their checksums. Damaged says which field differs."""
    if found[: _CHECKSUM.start] + bytes(8) + found[_CHECKSUM.stop :] == expected:
        return
    if found[:8] != MAGIC:
        raise Damaged(
            "it is not an object of this version of kvant; it is computed and stored again"
        )
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


def check_sums(found: bytes, expected: bytes, of_body: Any) -> None:
    if sign(expected, of_body) != found:
        raise Damaged("its checksum does not match")


def _specs(of: bytes) -> str:
    return of[_FIELDS.size :].rstrip(b"\0").decode(errors="replace")
