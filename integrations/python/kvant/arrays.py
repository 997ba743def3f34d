"""Checks of NumPy arrays, and memory as the library wants it. The one module here that imports
NumPy by itself.

Arrays of the right dtype and layout are used where they lie; others are copied, or refused when a
copy would hide a mistake: a wrong dtype, a wrong shape."""

from __future__ import annotations

import ctypes as c
from typing import Any

from . import checks
from .library import PAGE_ALIGN

try:
    import numpy as np
except ImportError as error:
    raise ImportError("kvant's arrays need NumPy: python3 -m pip install numpy") from error


def zeroed(n_bytes: int, align: int = PAGE_ALIGN) -> np.ndarray:
    """uint8, aligned; pages that nobody touches take no memory."""
    memory = np.zeros(n_bytes + align, np.uint8)
    return memory[-memory.ctypes.data % align :][:n_bytes]


def array(value: Any, what: str, dtype: Any, shape: tuple[int | None, ...]) -> np.ndarray:
    """value as a NumPy array of the same memory, after checking dtype and shape (None: any size).
    Anything with DLPack on the CPU will do, such as PyTorch's tensors."""
    value = on_host(value, what)
    if value.dtype != dtype:
        raise TypeError(
            f"{what}: {np.dtype(dtype)} is needed, not {value.dtype}; convert with .astype"
        )
    checks.shapes(value.shape, what, shape)
    return value


def on_host(value: Any, what: str) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    if not hasattr(value, "__dlpack__"):
        raise TypeError(
            f"{what}: an array is needed (NumPy, or with DLPack), not {type(value).__name__}"
        )
    try:
        return np.from_dlpack(value)
    except (
        BufferError,
        RuntimeError,
        TypeError,
    ) as error:  # another device, a dtype that NumPy lacks, a gradient
        dtype = getattr(value, "dtype", "dtype unknown")
        kind = f"{dtype} on {getattr(value, 'device', 'some device')}"
        raise TypeError(
            f"{what}: its memory cannot be used as a NumPy array ({kind}): {error}"
        ) from None


def contiguous(value: Any, what: str, dtype: Any, shape: tuple[int | None, ...]) -> np.ndarray:
    """The same, copied unless it is contiguous."""
    return np.ascontiguousarray(array(value, what, dtype, shape))


def rows(value: Any, what: str, shape: tuple[int | None, ...]) -> tuple[np.ndarray, int]:
    """float32 rows and the stride between them in floats. A view whose rows are contiguous is used
    without a copy."""
    value = array(value, what, np.float32, shape)
    inner = int(np.prod(value.shape[1:]))
    packed = value.size == 0 or value[:1].flags.c_contiguous
    stride = value.strides[0] if value.shape[0] > 1 else 4 * inner
    if not packed or stride < 4 * inner or stride % 4:
        value, stride = np.ascontiguousarray(value), 4 * inner
    return value, stride // 4


def channels(value: Any, what: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """A centre or a scale per channel; None stays None."""
    return None if value is None else contiguous(value, what, np.float32, shape)


def pointer(value: np.ndarray | None) -> int | None:
    return None if value is None else value.ctypes.data


def copied(address: int | None, dtype: str, shape: tuple[int, ...]) -> Any:
    """A new array of numbers that the library owns; None for NULL."""
    if address is None:
        return None
    made = np.empty(shape, dtype)
    c.memmove(made.ctypes.data, address, made.nbytes)
    return made
