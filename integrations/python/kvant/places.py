"""Finds the memory of a call's arrays: NumPy arrays on the host, or device memory of any library
that exports its address.

Both places answer the same three questions: the address of an input, the address of an output, and
a new output. The caller of a place does not know which of the two it has."""

from __future__ import annotations

import ctypes as c
from typing import Any, NamedTuple

from . import arrays, checks
from .arrays import np


class View(NamedTuple):
    """Numbers of one dtype. strides count elements. keep must live as long as the address is
    used."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    keep: Any


class Host:
    """NumPy arrays, and other arrays on the CPU with DLPack. Contiguous arrays are used without a
    copy, all other inputs are copied."""

    def take(
        self, value: Any, what: str, dtype: str, shape: tuple[int | None, ...], rows: bool = False
    ) -> View:
        """An input. With rows, only the last dimension must be contiguous."""
        value = arrays.array(value, what, dtype, shape)
        if not (rows and _rows_lie_well(value)):
            value = np.ascontiguousarray(value)
        return self._view(value)

    def give(self, value: Any, what: str, dtype: str, shape: tuple[int, ...]) -> View:
        """An output. It must be contiguous, because a copy would lose the numbers that are
        written."""
        array = arrays.array(value, what, dtype, shape)
        # NumPy before 2.1 takes every array of DLPack for a read-only one.
        if not (array.flags.c_contiguous and (array.flags.writeable or array is not value)):
            raise ValueError(f"{what}: a contiguous array that may be written to is needed")
        return self._view(array)

    def new(self, like: Any, shape: tuple[int, ...]) -> np.ndarray:
        """A float32 output."""
        return np.empty(shape, np.float32)

    @staticmethod
    def _view(value: np.ndarray) -> View:
        strides = tuple(stride // value.itemsize for stride in value.strides)
        return View(value.ctypes.data, value.shape, strides, value)


def _rows_lie_well(value: np.ndarray) -> bool:
    steps = value.strides[:-1]
    return value.strides[-1] == value.itemsize and all(
        step >= 0 and step % value.itemsize == 0 for step in steps
    )


class Gpu:
    """Arrays in device memory that have DLPack or __cuda_array_interface__: tensors of PyTorch,
    arrays of CuPy, JAX and Numba. Never copied, so all must be contiguous, or inputs with rows in
    their last dimension.

    stream: where the library's calls run, a cudaStream_t as a number; 0 is the legacy default
    stream."""

    def __init__(self, stream: int = 0) -> None:
        self._stream = stream or _LEGACY_STREAM

    def take(
        self, value: Any, what: str, dtype: str, shape: tuple[int | None, ...], rows: bool = False
    ) -> View:
        return self._checked(value, what, dtype, shape, rows, written=False)

    def give(self, value: Any, what: str, dtype: str, shape: tuple[int, ...]) -> View:
        return self._checked(value, what, dtype, shape, rows=False, written=True)

    def new(self, like: Any, shape: tuple[int, ...]) -> Any:
        if not hasattr(like, "new_empty"):
            raise TypeError(
                f"out: pass an array to write to; kvant cannot make one like {type(like).__name__}"
            )
        return like.new_empty(shape)

    def _checked(
        self,
        value: Any,
        what: str,
        dtype: str,
        shape: tuple[int | None, ...],
        rows: bool,
        written: bool,
    ) -> View:
        found, view = self._describe(value, what)
        if found != dtype:
            raise TypeError(f"{what}: {dtype} is needed, not {found}")
        checks.shapes(view.shape, what, shape)
        checks.strides(view.strides, view.shape, what, rows, written)
        return view

    def _describe(self, value: Any, what: str) -> tuple[str, View]:
        """dtype and view of an array on a GPU. DLPack is tried first: its producer also makes the
        stream wait for work on the array."""
        if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
            kind, _ = value.__dlpack_device__()
            if kind not in _ON_GPU:
                raise ValueError(f"{what}: it is not on a GPU")
            return read_dlpack(value.__dlpack__(stream=self._stream))
        if hasattr(value, "__cuda_array_interface__"):
            interface = value.__cuda_array_interface__
            if interface.get("stream") not in (None, self._stream):
                raise ValueError(
                    f"{what}: its work is on stream {interface['stream']}, "
                    f"but kvant's is on {self._stream}"
                )
            return _read_interface(interface, value)
        kind = type(value).__name__
        raise TypeError(
            f"{what}: an array on a GPU is needed (DLPack, __cuda_array_interface__), not {kind}"
        )


_ON_GPU = (2, 13)  # kDLCUDA, kDLCUDAManaged
_LEGACY_STREAM = 1  # in both protocols' numbers; other streams are their address
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat"}


class _DlTensor(c.Structure):
    """DLTensor of DLPack's C interface, with which a managed tensor begins."""

    _fields_ = [
        ("data", c.c_void_p), ("device_type", c.c_int32), ("device_id", c.c_int32),
        ("ndim", c.c_int32), ("code", c.c_uint8), ("bits", c.c_uint8), ("lanes", c.c_uint16),
        ("shape", c.POINTER(c.c_int64)), ("strides", c.POINTER(c.c_int64)),
        ("byte_offset", c.c_uint64),
    ]  # fmt: skip


def dl_tensor(capsule: Any) -> _DlTensor:
    """The DLTensor that a DLPack capsule points to."""
    get = c.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = c.c_void_p, [c.py_object, c.c_char_p]
    return _DlTensor.from_address(get(capsule, b"dltensor"))


def read_dlpack(capsule: Any) -> tuple[str, View]:
    """dtype and view of a capsule. The capsule is not consumed: it frees its memory when the view,
    which keeps it, goes."""
    tensor = dl_tensor(capsule)
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else _packed(shape)
    dtype = f"{_KINDS.get(tensor.code, 'unknown')}{tensor.bits}"
    return dtype, View((tensor.data or 0) + tensor.byte_offset, shape, strides, capsule)


def _read_interface(interface: dict[str, Any], value: Any) -> tuple[str, View]:
    dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    given = interface.get("strides")
    strides = (
        _packed(shape) if given is None else tuple(stride // dtype.itemsize for stride in given)
    )
    return dtype.name, View(interface["data"][0] or 0, shape, strides, value)


def _packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    size = 1
    for n in reversed(shape):
        strides.insert(0, size)
        size *= n
    return tuple(strides)
