"""Nearest-neighbour search on compressed vectors (kvant/index.h)."""

from __future__ import annotations

import ctypes as c
import os
from typing import Any, Callable, NamedTuple

import numpy as np

from . import arrays, checks
from . import structs as s
from .library import SAID, Owned, c_text, check, library, text_buffer

METRICS = ("ip", "cosine", "l2")
_MAX_DIM = 8192
_MOST_ID = 2**63 - 1  # ids are int64 here, -1 where nothing was found


class IndexInfo(NamedTuple):
    """bytes_per_vector: codes and factors. id_bytes: per vector, 0 while ids are 0 .. n - 1."""

    dim: int
    metric: str
    spec: str
    bits: int
    has_center: bool
    has_ids: bool
    is_view: bool
    n: int
    bytes_per_vector: int
    id_bytes: int
    memory_bytes: int
    file_bytes: int


class Index(Owned):
    """Vectors as codes of 1, 2, 3, 4 or 8 bits per dimension. metric: "ip" (inner product), "cosine"
    or "l2". spec: "turboquant-4", or "turboquant-3:dims=256" to keep 256 principal dimensions, which
    needs train().

    search() may run in several threads at once; other calls need the index for themselves."""

    def __init__(self, dim: int, metric: str = "ip", spec: str = "turboquant-4", center: Any = None) -> None:
        super().__init__("kvant_index_free")
        dim = checks.count(dim, "dim", most=_MAX_DIM)
        number = METRICS.index(checks.choice(metric, "metric", METRICS))
        middle = arrays.channels(center, "center", (dim,))
        params = s.IndexParams.new(dim=dim, metric=number, spec=c_text(spec, "spec"), center=arrays.pointer(middle))
        text = text_buffer()
        check("index", library().kvant_index_create(c.byref(params), c.byref(self._handle), text, len(text)), text)

    @classmethod
    def _opened(cls, function: str, path: str | os.PathLike[str]) -> Index:
        index, text = cls.__new__(cls), text_buffer()
        Owned.__init__(index, "kvant_index_free")
        if path is None:
            raise TypeError("path: the path of an index is needed, not None")
        status = getattr(library(), function)(c_text(path, "path"), c.byref(index._handle), text, len(text))
        check(f"index {os.fspath(path)}", status, text)
        return index

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Index:
        """Reads a file and verifies its checksum. Error when it is missing or damaged."""
        return cls._opened("kvant_index_load", path)

    @classmethod
    def view(cls, path: str | os.PathLike[str]) -> Index:
        """Maps a file: opened at once, read when a search needs it, and unchangeable. verify()
        compares the checksum."""
        return cls._opened("kvant_index_view", path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file beside path and renames it."""
        text = text_buffer()
        check("saving", library().kvant_index_save(self._handle, c_text(path, "path"), text, len(text)), text)

    def verify(self) -> None:
        """Reads the file of a view. Error when it is damaged."""
        check("index", library().kvant_index_verify(self._handle), SAID)

    @property
    def info(self) -> IndexInfo:
        info = s.IndexInfo.new()
        check("index info", library().kvant_index_get_info(self._handle, c.byref(info)))
        plain = info.plain() | {"metric": METRICS[info.metric]}
        flags = {name: bool(plain[name]) for name in ("has_center", "has_ids", "is_view")}
        return IndexInfo(**(plain | flags))

    def __len__(self) -> int:
        return self.info.n

    def _rows(self, value: Any, what: str) -> tuple[np.ndarray, int]:
        return arrays.rows(value, what, (None, self.info.dim))

    def train(self, rows: Any) -> None:
        """Learns the centre, and the directions of dims=, from float32 [n, dim]. Before the first
        vector."""
        rows, stride = self._rows(rows, "rows")
        status = library().kvant_index_train(self._handle, arrays.pointer(rows), stride, len(rows))
        check("training", status, SAID)

    def add(self, rows: Any, ids: Any = None, n_threads: int | None = None) -> None:
        """Adds float32 [n, dim], all rows or none. ids: int64 [n], none of them taken; None: going on
        behind the largest."""
        rows, stride = self._rows(rows, "rows")
        named = None if ids is None else self._ids(ids, "ids", len(rows))
        status = library().kvant_index_add(
            self._handle, arrays.pointer(rows), stride, len(rows), arrays.pointer(named), checks.threads(n_threads)
        )
        check("adding", status, SAID)

    def _ids(self, value: Any, what: str, n: int | None) -> np.ndarray:
        value = arrays.contiguous(value, what, np.int64, (n,))
        if value.size and value.min() < 0:
            raise ValueError(f"{what}: {value.min()} is not in 0 .. {_MOST_ID}")
        return value

    def remove(self, id: int) -> None:
        """Error when no vector has this id."""
        check("removing", library().kvant_index_remove(self._handle, checks.count(id, "id", 0, _MOST_ID)), SAID)

    def reconstruct(self, id: int) -> np.ndarray:
        """The vector as the index knows it, float32 [dim]. Error when no vector has this id."""
        row = np.empty(self.info.dim, np.float32)
        status = library().kvant_index_reconstruct(
            self._handle, checks.count(id, "id", 0, _MOST_ID), arrays.pointer(row)
        )
        check("reconstructing", status, SAID)
        return row

    def search(
        self,
        queries: Any,
        k: int = 10,
        n_threads: int | None = None,
        *,
        allowed: Any = None,
        allow: Callable[[int], bool] | None = None,
        rerank: int = 0,
        originals: Any = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """(scores, ids), float32 and int64 [n, k], the nearest first; ids are -1 where there are fewer.

        allowed: int64 ids, the only ones to find; allow: a function of an id, called for every vector.
        rerank: the number of candidates whose scores are computed again from originals, float32 [m,
        dim], row i of which is the vector of id i."""
        rows, stride = self._rows(queries, "queries")
        k, shape = checks.count(k, "k"), (len(rows), k)
        scores, ids = np.empty(shape, np.float32), np.empty(shape, np.int64)
        query = s.IndexQuery.new(rows=arrays.pointer(rows), stride=stride, n=len(rows), k=k)
        query.n_threads = checks.threads(n_threads)
        if allowed is not None:
            allowed = self._ids(allowed, "allowed", None)
            query.n_allowed = allowed.size
            query.allowed = arrays.pointer(allowed if allowed.size else ids)  # nothing is allowed: no NULL
        if allow is not None:
            query.allow = s.ALLOW(lambda _, id: bool(allow(id)))
        if rerank:
            kept, apart = self._rows(originals, "originals")
            query.rerank, query.original_stride, query.n_originals = checks.count(rerank, "rerank"), apart, len(kept)
            query.originals = arrays.pointer(kept)
        status = library().kvant_index_search(self._handle, c.byref(query), arrays.pointer(scores), arrays.pointer(ids))
        check("searching", status, SAID)
        return scores, ids
