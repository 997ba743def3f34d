"""A KvantCache as bytes: its pages, not decoded, and a head that describes the model. Owns the
file's format and its checks. Refuses caches with layers of other kinds, because kvant does not
hold their state.

    8 bytes   "kvantkv1", the version of the format
    8 bytes   length of the head, little-endian
    head      JSON: _head and, per store, its layers and, per sequence, how many blocks its window
              has left behind and how many bytes its other blocks take
    blocks    the bytes of kvant_sequence_export, sequence by sequence
    32 bytes  SHA-256 of all bytes before it"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

import torch

from ..library import PAGE_TOKENS, Error
from .store import Sequences, Store

if TYPE_CHECKING:
    from .cache import KvantCache

_MAGIC = b"kvantkv1"
_SHAPE = (
    "model_type num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_size"
).split()
_STORED = ("preset", "k", "v", "settings", "calibration")  # arguments of a KvantCache
_ARGUMENT = 10  # KVANT_ERR_ARGUMENT: the window has left this block behind
_DTYPES = {
    str(x).removeprefix("torch."): x
    for x in (torch.float32, torch.float16, torch.bfloat16, torch.float64)
}


def _shape(cache: KvantCache) -> dict[str, Any]:
    shape = {name: getattr(cache.config, name, None) for name in _SHAPE}
    shape = {name: x for name, x in shape.items() if isinstance(x, (int, str))}
    return shape | {"windows": [getattr(layer, "window", None) for layer in cache.layers]}


def _head(cache: KvantCache) -> dict[str, Any]:
    stored = {name: x if x is None else os.fspath(x) for name, x in cache._stored.items()}
    return {
        "model": _shape(cache),
        "weights": cache._seen_weights or cache._weights,
        "stored": stored,
        "exact": cache.exact,
    }


def _blocks(store: Store, number: int, tokens: int) -> tuple[int, bytes]:
    """How many blocks of a sequence its window left behind, and the bytes of the other blocks."""
    assert store.cache is not None
    n = -(-tokens // PAGE_TOKENS)
    for left_behind in range(n):
        try:
            data = store.cache.export_blocks(number, left_behind, n - left_behind)
        except Error as error:
            if error.status != _ARGUMENT or left_behind == n - 1:
                raise
        else:
            return left_behind, data
    return 0, b""


def to_bytes(cache: KvantCache) -> bytes:
    others = {type(layer).__name__ for layer in cache._others()} - {
        "DummyLayer"
    }  # which holds nothing
    if others:
        raise TypeError(
            f"KvantCache: layers that transformers stores ({', '.join(sorted(others))}) cannot "
            f"be saved"
        )
    stores, parts = [], []
    for store in cache._settle():
        if store.sequences is None or not store.starts:
            continue
        length = max(store.lengths.values())
        if set(store.lengths.values()) != {length} or len(store.lengths) != len(store.places):
            raise RuntimeError(
                "KvantCache: a call that failed left layers behind: begin a new cache"
            )
        like = next(x.like for x in cache.layers if getattr(x, "store", None) is store)
        saved = [
            _blocks(store, number, length - start)
            for start, number in zip(store.starts, store.sequences.numbers)
        ]
        parts += [data for _, data in saved]
        shape = [like[0].shape[1], like[0].shape[3], like[1].shape[3]]
        stores.append(
            dict(
                window=store.window,
                layers=list(store.places),
                length=length,
                starts=store.starts,
                blocks=[[left_behind, len(data)] for left_behind, data in saved],
            )
            | dict(shape=shape, dtype=str(like[0].dtype).removeprefix("torch."))
        )
    return packed(_head(cache) | {"stores": stores}, parts)


def packed(head: dict[str, Any], blocks: list[bytes]) -> bytes:
    words = json.dumps(head).encode()
    whole = b"".join([_MAGIC, len(words).to_bytes(8, "little"), words, *blocks])
    return whole + hashlib.sha256(whole).digest()


def _damaged(why: str) -> ValueError:
    return ValueError(f"KvantCache: these bytes are damaged or no saved cache: {why}")


def parse(data: bytes) -> tuple[dict[str, Any], memoryview]:
    """The head and the blocks. ValueError for damaged bytes and for another version."""
    if data[:7] == _MAGIC[:7] and data[7:8] not in (b"", _MAGIC[7:]):
        raise ValueError(
            f"KvantCache: saved by another version of kvant (format {data[7:8]!r}, and this one "
            f"reads b'1')"
        )
    if data[:8] != _MAGIC or len(data) < 48:
        raise _damaged("they do not begin like a saved cache")
    if hashlib.sha256(data[:-32]).digest() != data[-32:]:
        raise _damaged("the checksum does not match")
    size = int.from_bytes(data[8:16], "little")
    if size > len(data) - 48:
        raise _damaged("the head is cut short")
    try:
        head = json.loads(data[16 : 16 + size])
        blocks = memoryview(data)[16 + size : -32]
        total = sum(n for store in head["stores"] for _, n in store["blocks"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(f"the head cannot be read: {error}") from None
    if total != len(blocks):
        raise _damaged("the blocks' lengths do not add up")
    stored = head.get("stored")
    if not isinstance(stored, dict) or not all(
        name in _STORED and isinstance(x, (str, type(None))) for name, x in stored.items()
    ):
        raise _damaged("the head does not say how the rows are stored")
    return head, blocks


def _check(cache: KvantCache, head: dict[str, Any]) -> None:
    mine = _shape(cache)
    for name, x in head["model"].items():
        if mine.get(name) != x:
            raise ValueError(
                f"KvantCache: {name} is {x!r} in the file and {mine.get(name)!r} in the model"
            )


def _fill(
    cache: KvantCache, saved: dict[str, Any], blocks: memoryview, device: torch.device
) -> memoryview:
    """Fills one store; returns the blocks that follow it."""
    (heads, k_dim, v_dim), dtype = saved["shape"], _DTYPES[saved["dtype"]]
    if min(heads, k_dim, v_dim) < 1:
        raise _damaged("its heads have no dimension")
    starts, length = [int(x) for x in saved["starts"]], int(saved["length"])
    like = tuple(
        torch.empty((len(starts), heads, 0, dim), dtype=dtype, device=device)
        for dim in (k_dim, v_dim)
    )
    for number in saved["layers"]:
        cache.layers[number].lazy_initialization(*like)
    store = cache.layers[saved["layers"][0]].store
    if (
        store is None
        or list(store.places) != saved["layers"]
        or len(saved["blocks"]) != len(starts)
    ):
        raise _damaged("its layers differ from the layers of the model")
    store.begin(*like, cache._make)
    assert store.cache is not None and isinstance(store.sequences, Sequences)
    for start, number, (left_behind, size) in zip(starts, store.sequences.numbers, saved["blocks"]):
        if left_behind:
            store.cache.drop(number, PAGE_TOKENS * left_behind)
            store.kept_from = max(store.kept_from, start + PAGE_TOKENS * left_behind)
        if size:
            store.cache.import_blocks(number, blocks[:size])
        blocks = blocks[size:]
        if store.cache.length(number) != length - start:
            raise _damaged(
                f"a sequence has {store.cache.length(number)} tokens, "
                f"but its head says {length - start}"
            )
    store.starts, store.lengths = starts, dict.fromkeys(saved["layers"], length)
    return blocks


def fill(cache: KvantCache, head: dict[str, Any], blocks: memoryview, device: torch.device) -> None:
    """Fills a new cache with the saved one."""
    try:
        _check(cache, head)
        cache._weights = cache._weights or int(head["weights"])
        for saved in head["stores"]:
            blocks = _fill(cache, saved, blocks, device)
    except (AttributeError, LookupError, OverflowError, TypeError) as error:
        raise _damaged(f"the head cannot be read: {error!r}") from None
