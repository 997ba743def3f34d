"""Reads files of vectors: .npy, .fvecs, .bvecs, .fbin, .u8bin, .i8bin, .f16bin and .hdf5."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from .arrays import np

_BIN = {".fbin": "<f4", ".u8bin": "u1", ".i8bin": "i1", ".f16bin": "<f2"}
_VECS = {".fvecs": "<f4", ".bvecs": "u1"}


def read_vectors(
    path: str | os.PathLike[str], dataset: str = "train", first: int = 0, n: int | None = None
) -> Any:
    """Rows first .. first + n - 1 (n None: to the end) of a file: a float32 array [n, dim].

    Files of float32 are mapped: rows are read when they are used, and the array cannot be written.
    Other types are converted.

    .npy                            two dimensions, rows one after another
    .fvecs, .bvecs                  a length before each row
    .fbin, .u8bin, .i8bin, .f16bin  the counts of rows and columns, then the rows
    .hdf5                           `dataset`, such as "train" or "test"; needs h5py

    ValueError for a file that is damaged or of another kind."""
    path = pathlib.Path(path)
    if first < 0 or (n is not None and n < 0):
        raise ValueError(f"first {first}, n {n}: numbers from 0 on are needed")
    part = slice(first, None if n is None else first + n)
    kind = path.suffix
    if kind in (".hdf5", ".h5"):
        rows = _hdf5(path, dataset, part)
    elif kind == ".npy":
        rows = _npy(path, part)
    elif kind in _VECS:
        rows = _vecs(path, np.dtype(_VECS[kind]))[part]
    elif kind in _BIN:
        rows = _bin(path, np.dtype(_BIN[kind]))[part]
    else:
        raise ValueError(
            f"{path}: the name must end with .npy, .hdf5, .h5, {', '.join([*_VECS, *_BIN])}"
        )
    if rows.ndim != 2 or rows.dtype.kind not in "fiu":
        raise ValueError(
            f"{path}: rows of numbers are needed, not {rows.dtype} of shape {list(rows.shape)}"
        )
    return rows if rows.dtype == np.float32 else rows.astype(np.float32)


def _npy(path: pathlib.Path, part: slice) -> Any:
    with open(path, "rb"):
        pass  # an OSError of its own: no such file, no permission
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    # OSError: Windows maps no shortened file. OverflowError: a shape beyond 64 bits
    except (ValueError, EOFError, OSError, OverflowError) as error:
        raise ValueError(f"{path}: it is damaged, or not a .npy file: {error}") from None
    if not isinstance(rows, np.ndarray):  # a .npz file with another name
        rows.close()
        raise ValueError(f"{path}: it holds several arrays: save one of them with numpy.save")
    if isinstance(rows, np.memmap) and rows.offset + rows.nbytes != path.stat().st_size:
        raise ValueError(f"{path}: its size is not the size that its header states")
    return rows[part] if rows.ndim else rows


def _vecs(path: pathlib.Path, dtype: Any) -> Any:
    """A view of the file without the length before each row, after comparing all lengths."""
    size = path.stat().st_size
    if size == 0:
        return np.empty((0, 0), dtype)
    dim = int(np.fromfile(path, "<i4", 1)[0]) if size >= 4 else 0
    step = 4 + dim * dtype.itemsize
    if dim < 1 or size % step:
        raise ValueError(f"{path}: {size} bytes are not a whole number of rows of {dim} numbers")
    data = np.memmap(path, "u1", "r").reshape(-1, step)
    if not (data[:, :4] == data[0, :4]).all():
        raise ValueError(f"{path}: rows differ in length")
    return data[:, 4:].view(dtype)


def _bin(path: pathlib.Path, dtype: Any) -> Any:
    head = np.fromfile(path, "<u4", 2)
    n, dim = map(int, head) if head.size == 2 else (0, 0)
    if head.size != 2 or path.stat().st_size != 8 + n * dim * dtype.itemsize:
        raise ValueError(f"{path}: its size is not the size of {n} rows of {dim} numbers")
    return np.memmap(path, dtype, "r", 8, (n, dim)) if n * dim else np.empty((n, dim), dtype)


def _hdf5(path: pathlib.Path, dataset: str, part: slice) -> Any:
    try:
        import h5py
    except ImportError as error:
        raise ImportError(
            f"{path}: reading .hdf5 needs h5py: python3 -m pip install h5py"
        ) from error
    with h5py.File(path, "r") as file:
        if not isinstance(file.get(dataset), h5py.Dataset):
            raise ValueError(f"{path}: there is no dataset {dataset!r}, but {', '.join(file)}")
        return file[dataset][part]
