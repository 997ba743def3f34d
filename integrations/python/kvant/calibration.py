"""Calibration files: statistics of a model's keys, values and queries (kvant/calibration.h)."""

from __future__ import annotations

import ctypes as c
import os
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Sequence

from . import checks
from . import structs as s
from .library import Owned, c_text, facts, invoke, library

if TYPE_CHECKING:
    import numpy as np


def model_fingerprint(path: str | os.PathLike[str]) -> int:
    """A number that identifies a model's file; calibrations and settings files store it. OSError
    for a file that cannot be read."""
    found = library().kvant_model_fingerprint(c_text(path, "path"))
    if not found:
        raise OSError(f"{os.fspath(path)}: it cannot be read")
    return found


class CalibrationInfo(NamedTuple):
    """Facts about the whole file. n_kv_heads, head_dim and n_tokens are the largest of all
    layers."""

    model: str
    model_fingerprint: int
    n_layers: int
    n_kv_heads: int
    head_dim: int
    n_tokens: int
    seed: int
    clusters: tuple[int, ...]
    bytes: int
    checksum: int


class CalibrationEntry(NamedTuple):
    """Statistics of one (layer, kv head, role), copied. `mean`, `min`, `max`: float32 [head_dim],
    over the keys or values as the engine caches them. None for values: query_moment, float32
    [head_dim, head_dim], E[q q^T]; diagonal, float32 [head_dim]; matrix, float16, the lower
    triangle of transform=file row by row. `centroids`: one float32 [clusters, head_dim] per entry
    of CalibrationInfo.clusters.
    """

    mean: np.ndarray
    min: np.ndarray
    max: np.ndarray
    query_moment: np.ndarray | None
    diagonal: np.ndarray | None
    matrix: np.ndarray | None
    centroids: tuple[np.ndarray, ...]


class Calibration(Owned):
    """A calibration file, read at once. Error when the file is missing or damaged. Never changes:
    any number of threads may use it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__("kvant_calibration_free")
        if path is None:
            raise TypeError("path: the path of a calibration is needed, not None")
        what, name = f"calibration {os.fspath(path)}", c_text(path, "path")
        invoke(what, "kvant_calibration_load", name, self._handle)
        self._read_info()

    @classmethod
    def owning(cls, pointer: int | None) -> Calibration:
        """Takes over a calibration that a call of the library made."""
        calibration = cls.__new__(cls)
        Owned.__init__(calibration, "kvant_calibration_free")
        calibration._handle.value = pointer
        calibration._read_info()
        return calibration

    def _read_info(self) -> None:
        name = "kvant_calibration_get_info"
        plain = facts("calibration info", name, s.CalibrationInfo, self._handle)
        clusters = tuple(plain["clusters"][: plain.pop("n_codebooks")])
        self.info = CalibrationInfo(**plain | {"clusters": clusters})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a calibration file; path never holds half of one."""
        what, name = f"calibration {os.fspath(path)}", c_text(path, "path")
        invoke(what, "kvant_calibration_save", self._handle, name)

    def entry(self, layer: int, kv_head: int, role: str = "k") -> CalibrationEntry:
        """Statistics of one kv head. IndexError when the calibration has none."""
        from .arrays import copied

        found = s.CalibrationEntry.new()
        place = checks.count(layer, "layer", least=0), checks.count(kv_head, "kv_head", least=0)
        role_number = checks.role(role)
        if library().kvant_calibration_get_entry(self._handle, *place, role_number, c.byref(found)):
            raise IndexError(
                f"layer {layer}, kv head {kv_head}, {role}: the calibration has no entry"
            )
        dim = found.head_dim
        return CalibrationEntry(
            mean=copied(found.mean, "float32", (dim,)),
            min=copied(found.min, "float32", (dim,)),
            max=copied(found.max, "float32", (dim,)),
            query_moment=copied(found.query_moment, "float32", (dim, dim)),
            diagonal=copied(found.diagonal, "float32", (dim,)),
            matrix=copied(found.matrix, "float16", (dim * (dim + 1) // 2,)),
            centroids=tuple(
                copied(found.centroids[i], "float32", (n, dim))
                for i, n in enumerate(self.info.clusters)
            ),
        )

    def __repr__(self) -> str:
        return (
            f"<kvant.Calibration of {self.info.model!r}: {self.info.n_layers} layers, "
            f"{self.info.n_tokens} tokens>"
        )


class Calibrator(Owned):
    """Gathers a calibration from rows and queries of a model, as its engine caches them: keys after
    RoPE.

    clusters: sizes of sets of centroids, increasing; () for none. sample_rows: kept per (layer,
    role) for k-means, 0 for 8 per cluster of the largest set. One thread at a time. Error of status
    50 for a NaN or an infinity: nothing of the call was added."""

    def __init__(
        self,
        model: str = "",
        model_fingerprint: int = 0,
        seed: int = 0,
        clusters: Sequence[int] = (),
        sample_rows: int = 0,
        n_threads: int | None = None,
    ) -> None:
        super().__init__("kvant_calibrator_free")
        sizes = [checks.count(n, "clusters", least=2) for n in clusters]
        array = (c.c_uint32 * len(sizes))(*sizes)
        config = s.CalibratorConfig.new(
            model=checks.text(model, "model").encode(),
            model_fingerprint=checks.count(
                model_fingerprint, "model_fingerprint", least=0, most=2**64 - 1
            ),
            seed=checks.count(seed, "seed", least=0, most=2**64 - 1),
            clusters=c.addressof(array),
            n_codebooks=len(sizes),
            sample_rows=checks.count(sample_rows, "sample_rows", least=0),
            n_threads=checks.threads(n_threads),
        )
        invoke("calibrator", "kvant_calibrator_create", config, self._handle)

    def add_rows(self, layer: int, role: str, rows: np.ndarray) -> None:
        """Adds rows of a layer, float32 [n, n_kv_heads, head_dim]. The first call of a (layer,
        role) fixes its shape."""
        from . import arrays

        rows, stride = arrays.rows(rows, "rows", (None, None, None))
        place = checks.count(layer, "layer", least=0), checks.role(role)
        given = *rows.shape[1:], rows.ctypes.data, stride, rows.shape[0]
        what = f"rows of layer {layer}"
        invoke(what, "kvant_calibrator_add_rows", self._handle, *place, *given)

    def add_queries(self, layer: int, kv_head: int, queries: np.ndarray) -> None:
        """Adds queries, float32 [n, head_dim], of one query head that reads kv_head. After keys of
        the layer."""
        from . import arrays

        queries, stride = arrays.rows(queries, "queries", (None, None))
        place = checks.count(layer, "layer", least=0), checks.count(kv_head, "kv_head", least=0)
        given = queries.shape[1], queries.ctypes.data, stride, queries.shape[0]
        what = f"queries of layer {layer}"
        invoke(what, "kvant_calibrator_add_queries", self._handle, *place, *given)

    def add_attention(
        self,
        layer: int,
        kv_head: int,
        keys: np.ndarray,
        queries: np.ndarray,
        mask: np.ndarray | None = None,
        scale: float | None = None,
        n_exact: int = 0,
    ) -> None:
        """Adds the attention weights that queries, float32 [m, head_dim], give to keys, float32 [n,
        head_dim]; about 100 queries per text are enough. `mask`, float32 [m, n], is added to
        scores; -inf hides. `scale`: 1 / sqrt(head_dim) by default. The first n_exact keys count 0,
        because a cache keeps them as fp16. Call it after add_rows of the layer's keys."""
        from . import arrays

        keys, key_stride = arrays.rows(keys, "keys", (None, None))
        queries, query_stride = arrays.rows(queries, "queries", (None, keys.shape[1]))
        if mask is not None:
            mask = arrays.contiguous(mask, "mask", "float32", (queries.shape[0], keys.shape[0]))
        attention = s.CalibratorAttention.new(
            keys=keys.ctypes.data,
            key_stride=key_stride,
            n_keys=keys.shape[0],
            queries=queries.ctypes.data,
            query_stride=query_stride,
            n_queries=queries.shape[0],
            mask=arrays.pointer(mask),
            mask_stride=keys.shape[0],
            scale=keys.shape[1] ** -0.5 if scale is None else checks.number(scale, "scale"),
        )
        place = checks.count(layer, "layer", least=0), checks.count(kv_head, "kv_head", least=0)
        given = keys.shape[1], checks.count(n_exact, "n_exact", least=0), attention
        what = f"attention of layer {layer}"
        invoke(what, "kvant_calibrator_add_attention", self._handle, *place, *given)

    def add_moments(
        self,
        layer: int,
        role: str,
        n_rows: int,
        *,
        rows: np.ndarray | None = None,
        n_queries: int = 0,
        **sums: Any,
    ) -> None:
        """Adds sums that were computed elsewhere, for example on a GPU, in place of add_rows,
        add_queries and add_attention. sum (float64), min and max (float32) are arrays [n_kv_heads,
        head_dim]. Keys also need spread, float64 [n_kv_heads, head_dim, head_dim]. moment with
        n_queries, and attended with attended_sum and attended_weight, may be left out together.
        include/kvant/calibration.h has the formulas. `rows`: as in add_rows, for k-means."""
        from . import arrays

        sums["sum"] = arrays.contiguous(sums["sum"], "sum", "float64", (None, None))
        heads, dim = sums["sum"].shape
        shapes = {name: (heads, dim) for name in ("min", "max", "attended_sum")} | {
            "attended_weight": (heads,)
        }
        shapes |= {name: (heads, dim, dim) for name in ("spread", "moment", "attended")}
        for name in sums.keys() - {"sum"}:
            dtype = "float32" if name in ("min", "max") else "float64"
            sums[name] = arrays.contiguous(
                sums[name], name, dtype, shapes[checks.choice(name, "sums", tuple(shapes))]
            )
        kept, stride = (
            (None, 0) if rows is None else arrays.rows(rows, "rows", (n_rows, heads, dim))
        )
        made = s.CalibratorMoments.new(
            n_kv_heads=heads,
            head_dim=dim,
            n_rows=checks.count(n_rows, "n_rows"),
            n_queries=checks.count(n_queries, "n_queries", least=0),
            rows=arrays.pointer(kept),
            stride=stride,
            **{name: array.ctypes.data for name, array in sums.items()},
        )
        place = checks.count(layer, "layer", least=0), checks.role(role)
        invoke(f"sums of layer {layer}", "kvant_calibrator_add_moments", self._handle, *place, made)

    def finish(self, progress: Callable[[int], None] | None = None) -> Calibration:
        """Runs k-means, layer by layer, and makes the calibration. progress is called with the
        number of layers that are left. An exception that it raises stops the work; a second call of
        finish continues."""
        left, made = c.c_uint32(1), c.c_void_p()
        while left.value:
            invoke("k-means", "kvant_calibrator_cluster", self._handle, c.byref(left))
            if progress:
                progress(left.value)
        invoke("calibration", "kvant_calibrator_finish", self._handle, made)
        return Calibration.owning(made.value)
