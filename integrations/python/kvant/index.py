"""Nearest-neighbour search on compressed vectors (kvant/index.h)."""

from __future__ import annotations

import ctypes as c
import os
import threading
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from . import arrays, checks
from . import structs as s
from .library import Owned, c_text, check, facts, invoke, library

if TYPE_CHECKING:
    import numpy as np

METRICS = ("ip", "cosine", "l2")
DEVICES = ("cpu", "cuda")
_MAX_DIM = 8192
_MOST_ID = 2**63 - 1  # ids are int64 here, -1 where nothing was found
_ARGUMENT = 10  # KVANT_ERR_ARGUMENT: no vector has this id


class IndexInfo(NamedTuple):
    """`bytes_per_vector`: codes and factors. `id_bytes`: added per vector once ids are not row
    numbers. `memory_bytes`: of this process, without a view's mapped file. `file_bytes`: size of
    the file that save writes. `next_id`: id of the next vector that is added without an id."""

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
    n_lists: int
    next_id: int


class _Copy(Owned):
    """A copy of an index's codes on the current GPU. The index keeps it."""

    def __init__(self, index: Index) -> None:
        super().__init__("kvant_index_gpu_free")
        invoke("index on the GPU", "kvant_index_gpu_create", index._handle, self._handle)


class Index(Owned):
    """Compressed vectors, searched without decoding them.

        index = kvant.Index(384)
        index.add(rows)                                  # float32 [n, 384]; nothing is trained
        scores, ids = index.search(queries, 10)          # float32 and int64 [queries, 10]

    Codes have 1 to 8 bits per dimension. The spec "turboquant-4" is the usual one, and "trellis-4"
    finds more and takes longer to add. The spec "trellis-3:dims=256" keeps 256 principal
    dimensions. The spec "turboquant-4:lists=128" makes inverted lists. Both need train. The option
    "rows=int8" also keeps each vector in 8 bits per dimension, for rerank. `metric`: "ip" (inner
    product) and "cosine", where larger scores are nearer, or "l2", squared distances. `center`:
    float32 [dim], subtracted before rounding. `centroids`: float32 [lists, dim] instead of k-means.
    Results depend on neither threads nor batches; equal scores are in the order of ids.

    With device="cuda" the index searches on the GPU, with the same results. The first search after
    a change copies the codes there. `k` and `rerank` are then at most 4096, and lists= is refused.

    Several threads may search at once. A call that changes the index must be the only call.
    Arguments of a wrong dtype are refused with TypeError, of a wrong shape with ValueError. Error
    is for everything that the library refuses: a NaN, an infinity, an id that is taken or missing,
    a change of a view."""

    def __init__(
        self,
        dim: int,
        metric: str = "ip",
        spec: str = "turboquant-4",
        center: Any = None,
        device: str = "cpu",
        centroids: Any = None,
    ) -> None:
        super().__init__("kvant_index_free")
        self._place(device)
        dim = checks.count(dim, "dim", most=_MAX_DIM)
        center = arrays.channels(center, "center", (dim,))
        params = s.IndexParams.new(
            dim=dim,
            metric=METRICS.index(checks.choice(metric, "metric", METRICS)),
            spec=c_text(checks.text(spec, "spec"), "spec"),
            center=arrays.pointer(center),
        )
        if centroids is not None:
            centroids, params.centroid_stride = arrays.rows(centroids, "centroids", (None, dim))
            params.n_centroids, params.centroids = centroids.shape[0], centroids.ctypes.data
        invoke(f"index {spec!r}", "kvant_index_create", params, self._handle)
        self.dim, self.metric = dim, metric

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str = "cpu") -> Index:
        """Reads a file that save wrote and verifies its checksum. Error for a damaged or missing
        file."""
        return cls._open("kvant_index_load", path, device)

    @classmethod
    def view(cls, path: str | os.PathLike[str], device: str = "cpu") -> Index:
        """The same without reading: the file is mapped and cannot be changed. verify() reads and
        checks it."""
        return cls._open("kvant_index_view", path, device)

    def _place(self, device: str) -> None:
        self.device = checks.choice(device, "device", DEVICES)
        self._copy: _Copy | None = None
        self._copying = threading.Lock()

    def _change(self) -> c.c_void_p:
        """The handle, for a call that changes the index."""
        self._copy = None
        return self._handle

    @classmethod
    def _open(cls, function: str, path: str | os.PathLike[str], device: str) -> Index:
        index = cls.__new__(cls)
        Owned.__init__(index, "kvant_index_free")
        index._place(device)
        name = c_text(path, "path")
        if name is None:
            raise TypeError("path: the path of an index is needed, not None")
        invoke(f"index {os.fspath(path)}", function, name, index._handle)
        info = index.info
        if info.next_id > _MOST_ID + 1:
            raise ValueError(
                f"index {os.fspath(path)}: it has ids above {_MOST_ID}, which int64 cannot hold"
            )
        index.dim, index.metric = info.dim, info.metric
        return index

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the index; path never holds half of it."""
        name = c_text(path, "path")
        if name is None:
            raise TypeError("path: a path is needed, not None")
        invoke(f"index {os.fspath(path)}", "kvant_index_save", self._handle, name)

    def verify(self) -> None:
        """Reads a view's whole file. Error when its checksum is wrong."""
        invoke("index", "kvant_index_verify", self._handle)

    def train(self, rows: Any) -> None:
        """Learns the centre, the directions of dims= and the centroids of lists= from rows [n,
        dim], a sample of the vectors that will be added. Call it before the first add."""
        rows, stride = arrays.rows(rows, "rows", (None, self.dim))
        if not rows.shape[0]:
            raise ValueError("rows: there are no rows to learn from")
        given = rows.ctypes.data, stride, rows.shape[0]
        invoke("train", "kvant_index_train", self._change(), *given)

    def add(self, rows: Any, n_threads: int | None = None) -> None:
        """Adds float32 rows [n, dim], all or none. Their ids continue from the largest id, or begin
        at 0. The largest possible id is 2**63 - 1. `n_threads`: None, as many as this process may
        use."""
        self._add(rows, None, n_threads)

    def add_with_ids(self, rows: Any, ids: Any, n_threads: int | None = None) -> None:
        """The same with int64 ids [n] from 0 on, which the index does not have yet."""
        self._add(rows, self._ids(ids), n_threads)

    def _add(self, rows: Any, ids: np.ndarray | None, n_threads: int | None) -> None:
        rows, stride = arrays.rows(rows, "rows", (None, self.dim))
        if ids is not None:
            checks.shapes(ids.shape, "ids", (rows.shape[0],))
        elif self.info.next_id + rows.shape[0] > _MOST_ID + 1:
            raise ValueError(
                f"rows: their ids would be above {_MOST_ID}: give ids with add_with_ids"
            )
        if rows.shape[0]:
            given = rows.ctypes.data, stride, rows.shape[0], arrays.pointer(ids)
            threads = checks.threads(n_threads)
            invoke("add", "kvant_index_add", self._change(), *given, threads)

    @staticmethod
    def _ids(ids: Any, what: str = "ids") -> np.ndarray:
        ids = arrays.contiguous(ids, what, "int64", (None,))
        if ids.size and ids.min() < 0:
            raise ValueError(f"{what}: {ids.min()} is not from 0 to {_MOST_ID}")
        return ids

    def remove_ids(self, ids: Any) -> int:
        """Removes the vectors with these int64 ids [n], each in constant time, and ignores ids that
        the index does not have. Returns how many vectors it removed."""
        ids, before = self._ids(ids), len(self)
        for i in ids.tolist():
            status = library().kvant_index_remove(self._change(), i)
            if status != _ARGUMENT:
                check(f"id {i}", status)
        return before - len(self)

    def search(
        self,
        queries: Any,
        k: int = 10,
        n_threads: int | None = None,
        *,
        allowed: Any = None,
        allow: Callable[[int], Any] | None = None,
        rerank: int = 0,
        originals: Any = None,
        n_probe: int = 0,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest vectors of each query [n, dim]: scores, float32 [n, k], and ids, int64 [n,
        k], the nearest first. If there are fewer than k, the remaining ids are -1.

        `allowed`: int64 ids, the only ids that may be found; unknown ids are ignored. `allow`: a
        function of an id, called for every vector that passes allowed; it is slow, so use it for
        few vectors. Both may be given. `rerank`: this many candidates get exact scores from
        originals, float32 [m, dim], whose row i is the vector with id i (an np.memmap, too); the
        remaining vectors keep their scores. Without originals, an index with rows=int8 ranks by its
        rows. `n_probe`: the number of inverted lists that are searched if the spec has lists=; 0: 8
        lists. A number beyond all lists searches all."""
        queries, stride = arrays.rows(queries, "queries", (None, self.dim))
        shape = (queries.shape[0], checks.count(k, "k"))
        scores, ids = arrays.np.empty(shape, "float32"), arrays.np.empty(shape, "int64")
        raised: list[BaseException] = []
        query = s.IndexQuery.new(rows=queries.ctypes.data, stride=stride, n=shape[0], k=shape[1])
        query.n_threads, asked = checks.threads(n_threads), _asked(allow, raised)
        query.allow = c.cast(asked, c.c_void_p)
        if allowed is not None:
            allowed = self._ids(allowed, "allowed")
            query.n_allowed = allowed.size
            query.allowed = arrays.pointer(allowed if allowed.size else ids)  # NULL would allow all
        query.n_probe = checks.count(n_probe, "n_probe", least=0)
        query.rerank = checks.count(rerank, "rerank", least=0)
        if originals is not None:
            rows, query.original_stride = arrays.rows(originals, "originals", (None, self.dim))
            query.n_originals, query.originals = rows.shape[0], rows.ctypes.data
        arguments = c.byref(query), scores.ctypes.data, ids.ctypes.data
        try:
            if self.device == "cpu":
                invoke("search", "kvant_index_search", self._handle, *arguments)
            else:
                copy = self._on_gpu()
                invoke("search", "kvant_index_gpu_search", copy.handle, *arguments)
        finally:
            if raised:
                raise raised[0] from None
        return scores, ids

    def _on_gpu(self) -> _Copy:
        """The copy of the codes on the GPU, made again after a change of the index."""
        with self._copying:
            copy = self._copy = self._copy or _Copy(self)
            return copy

    def reconstruct(self, id: int) -> np.ndarray:
        """The vector with this id as the index stores it, float32 [dim]. Error when no vector has
        it."""
        row = arrays.np.empty(self.dim, "float32")
        number = checks.count(id, "id", least=0, most=_MOST_ID)
        invoke("reconstruct", "kvant_index_reconstruct", self._handle, number, row.ctypes.data)
        return row

    @property
    def info(self) -> IndexInfo:
        plain = facts("index info", "kvant_index_get_info", s.IndexInfo, self._handle)
        plain["metric"] = METRICS[plain["metric"]]
        plain |= {name: bool(plain[name]) for name in ("has_center", "has_ids", "is_view")}
        return IndexInfo(**plain)

    def __len__(self) -> int:
        return self.info.n

    @property
    def ntotal(self) -> int:
        """len(index), as faiss calls it."""
        return len(self)

    def __repr__(self) -> str:
        info = self.info
        return (
            f"<kvant.Index of {info.n} vectors, {info.dim} numbers each, "
            f"{info.spec}, {info.metric}>"
        )


def _asked(allow: Callable[[int], Any] | None, raised: list[BaseException]) -> Any:
    """Wraps allow for C. The first exception that it raises is kept in raised, and from then on
    nothing is allowed."""
    if allow is None:
        return s.ALLOW()

    def answer(_context: int | None, id: int) -> int:
        try:
            return int(not raised and bool(allow(id)))
        except BaseException as error:  # Ctrl-C, too: C cannot carry it
            raised.append(error)
            return 0

    return s.ALLOW(answer)
