"""Nearest-neighbour search on compressed vectors (kvant/index.h)."""

from __future__ import annotations

import ctypes as c
import os
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from . import arrays, checks
from . import structs as s
from .library import SAID, Owned, c_text, check, library, text_buffer

if TYPE_CHECKING:
    import numpy as np

METRICS = ("ip", "cosine", "l2")
NO_ID = -1
_ARGUMENT = 10  # KVANT_ERR_ARGUMENT: no vector has this id


class IndexInfo(NamedTuple):
    """bytes_per_vector: codes and factors; id_bytes come on top once ids are no row numbers.
    memory_bytes: of this process, without a view's mapped file. file_bytes: what save writes."""

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
    """Vectors as codes of 1, 2, 4 or 8 bits per number, searched without decoding them.

        index = kvant.Index(384, "turboquant-4")
        index.add(rows)                                  # float32 [n, 384]; nothing is trained
        scores, ids = index.search(queries, 10)          # float32 and int64 [queries, 10]

    spec: "turboquant-B". metric: "ip" and "cosine", larger scores are nearer, or "l2", squared
    distances. center: float32 [dim], subtracted before rounding; train takes it from rows.
    Results depend on neither threads nor batches; equal scores come in the order of ids.

    Threads may search at once. Calls that change the index need it for themselves. Arguments of a
    wrong dtype are refused with TypeError, of a wrong shape with ValueError; Error has what the
    library refuses: a NaN, an infinity, an id that is taken or missing, a change of a view."""

    def __init__(self, dim: int, spec: str = "turboquant-4", metric: str = "ip", center: Any = None) -> None:
        super().__init__("kvant_index_free")
        dim = checks.count(dim, "dim")
        center = arrays.channels(center, "center", (dim,))
        params = s.IndexParams.new(
            dim=dim,
            metric=METRICS.index(checks.choice(metric, "metric", METRICS)),
            spec=c_text(checks.text(spec, "spec"), "spec"),
            center=arrays.pointer(center),
        )
        text = text_buffer()
        status = library().kvant_index_create(c.byref(params), c.byref(self._handle), text, len(text))
        check(f"index {spec!r}", status, text)
        self.dim, self.metric = dim, metric

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Index:
        """Reads what save wrote and verifies its checksum. Error for a damaged or missing file."""
        return cls._open("kvant_index_load", path)

    @classmethod
    def view(cls, path: str | os.PathLike[str]) -> Index:
        """The same without reading: the file is mapped and cannot be changed. verify() reads and
        checks it."""
        return cls._open("kvant_index_view", path)

    @classmethod
    def _open(cls, function: str, path: str | os.PathLike[str]) -> Index:
        index = cls.__new__(cls)
        Owned.__init__(index, "kvant_index_free")
        text, name = text_buffer(), c_text(path, "path")
        if name is None:
            raise TypeError("path: the path of an index is needed, not None")
        status = getattr(library(), function)(name, c.byref(index._handle), text, len(text))
        check(f"index {os.fspath(path)}", status, text)
        info = index.info()
        index.dim, index.metric = info.dim, info.metric
        return index

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the index; path never holds half of it."""
        text, name = text_buffer(), c_text(path, "path")
        if name is None:
            raise TypeError("path: a path is needed, not None")
        check(f"index {os.fspath(path)}", library().kvant_index_save(self._handle, name, text, len(text)), text)

    def verify(self) -> None:
        """Reads a view's whole file. Error when its checksum is wrong."""
        check("index", library().kvant_index_verify(self._handle))

    def train(self, rows: Any) -> None:
        """Takes the centre from rows [n, dim], a sample of what will be added: their mean. Optional;
        before the first add."""
        rows, stride = arrays.rows(rows, "rows", (None, self.dim))
        check("train", library().kvant_index_train(self._handle, rows.ctypes.data, stride, rows.shape[0]), SAID)

    def add(self, rows: Any, n_threads: int | None = None) -> None:
        """Adds float32 rows [n, dim], all or none. Their ids go on from the largest one, from 0 at
        first. n_threads: None, as many as this process may use."""
        self._add(rows, None, n_threads)

    def add_with_ids(self, rows: Any, ids: Any, n_threads: int | None = None) -> None:
        """The same with int64 ids [n] from 0 on, which the index does not have yet."""
        self._add(rows, self._ids(ids), n_threads)

    def _add(self, rows: Any, ids: np.ndarray | None, n_threads: int | None) -> None:
        rows, stride = arrays.rows(rows, "rows", (None, self.dim))
        if ids is not None:
            checks.shapes(ids.shape, "ids", (rows.shape[0],))
        if rows.shape[0]:
            at, n = rows.ctypes.data, rows.shape[0]
            threads = checks.threads(n_threads)
            check("add", library().kvant_index_add(self._handle, at, stride, n, arrays.pointer(ids), threads), SAID)

    @staticmethod
    def _ids(ids: Any) -> np.ndarray:
        ids = arrays.contiguous(ids, "ids", "int64", (None,))
        if ids.size and ids.min() < 0:
            raise ValueError(f"ids: {ids.min()} is not from 0 on")
        return ids

    def remove_ids(self, ids: Any) -> int:
        """Removes the vectors with these int64 ids [n], each in constant time. How many there were;
        other ids are ignored."""
        ids, before = self._ids(ids), len(self)
        for i in ids.tolist():
            status = library().kvant_index_remove(self._handle, i)
            if status != _ARGUMENT:
                check(f"id {i}", status)
        return before - len(self)

    def search(
        self,
        queries: Any,
        k: int,
        n_threads: int | None = None,
        allowed: Any = None,
        allow: Callable[[int], Any] | None = None,
        rerank: int = 0,
        original: Any = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest of each query [n, dim]: scores, float32 [n, k], and ids, int64 [n, k], the
        nearest first. Where there are fewer, ids are -1.

        allowed: int64 ids, the only ones that may be found; unknown ones are ignored. allow: a
        function of an id, called for every vector that passes allowed: slow, for few. Both may be
        given. rerank: that many candidates get exact scores from original, an array [vectors, dim]
        whose row i is the vector with id i (np.memmap will do), or a function of an id array that
        returns their rows."""
        queries, stride = arrays.rows(queries, "queries", (None, self.dim))
        k, rerank = checks.count(k, "k", most=2**32 - 1), checks.count(rerank, "rerank", least=0, most=2**32 - 1)
        if (rerank > 0) != (original is not None):
            raise TypeError("rerank and original: both are needed, or none")
        wanted = max(k, rerank)
        allowed = None if allowed is None else self._ids(allowed)
        found = arrays.np.full((queries.shape[0], wanted), NO_ID, "int64")
        scores = arrays.np.empty(found.shape, "float32")
        raised: list[BaseException] = []
        query = s.IndexQuery.new(
            rows=queries.ctypes.data,
            stride=stride,
            n=queries.shape[0],
            k=wanted,
            n_threads=checks.threads(n_threads),
            # An empty list allows nothing; its pointer must not be NULL, which allows all.
            allowed=None if allowed is None else allowed.ctypes.data or c.addressof(c.c_uint64()),
            n_allowed=0 if allowed is None else allowed.size,
            allow=_asked(allow, raised),
        )
        if queries.shape[0]:
            status = library().kvant_index_search(self._handle, c.byref(query), scores.ctypes.data, found.ctypes.data)
            if raised:
                raise raised[0]
            check("search", status)
        return self._rank(queries, scores, found, k, original) if rerank else (scores, found)

    def _rank(
        self, queries: np.ndarray, scores: np.ndarray, found: np.ndarray, k: int, original: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k best of found by their exact scores."""
        np, exact = arrays.np, arrays.np.full(scores.shape, -arrays.np.inf, "float32")
        for query, ids, out in zip(queries, found, exact):
            there = ids[ids != NO_ID]
            rows = original(there) if callable(original) else original[there]
            rows = arrays.array(rows, "original", "float32", (there.size, self.dim))
            out[: there.size] = _nearness(self.metric, query, rows)
        order = np.lexsort((found, -exact), axis=1)[:, :k]
        ranked = np.take_along_axis(exact, order, 1)
        return (-ranked if self.metric == "l2" else ranked), np.take_along_axis(found, order, 1)

    def reconstruct(self, id: int) -> np.ndarray:
        """The vector with this id as the index knows it, float32 [dim]. Error when there is none."""
        row = arrays.np.empty(self.dim, "float32")
        number = checks.count(id, "id", least=0, most=2**63 - 1)
        check(f"id {id}", library().kvant_index_reconstruct(self._handle, number, row.ctypes.data))
        return row

    def info(self) -> IndexInfo:
        """What the index is, and what it costs."""
        info = s.IndexInfo.new()
        check("index info", library().kvant_index_get_info(self._handle, c.byref(info)))
        plain = info.plain()
        plain["metric"] = METRICS[plain["metric"]]
        plain |= {name: bool(plain[name]) for name in ("has_center", "has_ids", "is_view")}
        return IndexInfo(**plain)

    def __len__(self) -> int:
        return self.info().n

    @property
    def ntotal(self) -> int:
        """len(index), as faiss calls it."""
        return len(self)

    def __repr__(self) -> str:
        info = self.info()
        return f"<kvant.Index of {info.n} vectors, {info.dim} numbers each, {info.spec}, {info.metric}>"


def _asked(allow: Callable[[int], Any] | None, raised: list[BaseException]) -> Any:
    """allow as C calls it. What it raises ends up in raised, and from then on nothing is allowed."""
    if allow is None:
        return s.INDEX_ALLOW()

    def answer(_context: int | None, id: int) -> int:
        try:
            return int(not raised and bool(allow(id)))
        except BaseException as error:  # Ctrl-C, too: C cannot carry it
            raised.append(error)
            return 0

    return s.INDEX_ALLOW(answer)


def _nearness(metric: str, query: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Exact scores; squared distances are negative, so that larger is nearer."""
    np = arrays.np
    if metric == "l2":
        return -np.square(rows - query).sum(axis=1)
    products = rows @ query
    if metric == "ip":
        return products
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(query)
    return np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
