"""Checks of what callers pass, with messages. Works on anything that looks like a tensor; PyTorch
is not needed here.

A call of libkvant reads the memory that its arguments describe. So every shape, dtype, device and
stride is compared with what the call says before a pointer leaves Python."""

import math
import operator

from .library import ROLES, library

NUMBERS = ("float32", "float16", "bfloat16")


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def count(value, what, least=1, most=2**31 - 1):
    """value as an int in least .. most."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what}: a whole number is needed, not {value!r}") from None
    if isinstance(value, bool) or not least <= number <= most:
        raise ValueError(f"{what}: {value!r} is not from {least} to {most}")
    return number


def number(value, what):
    """A finite number from 0 on."""
    if isinstance(value, (str, bytes)) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{what}: {value!r} is not a number from 0 on")
    return float(value)


def threads(value):
    """A number of threads; None: as many as this process may use (kvant_available_cpus)."""
    if value is not None:
        return count(value, "n_threads", most=1024)
    return library().kvant_available_cpus()


def text(value, what):
    if not isinstance(value, str):
        raise TypeError(f"{what}: a string is needed, not {value!r}")
    return value


def handle(value, what, free):
    """The pointer of an object of the library that is freed with free, or None."""
    if value is None:
        return None
    if getattr(value, "_free", None) != free:
        raise TypeError(f"{what}: an object of kvant is needed, not {type(value).__name__}")
    return value.handle


def choice(value, what, choices):
    if value not in choices:
        raise ValueError(f"{what}: {value!r} is none of {', '.join(repr(c) for c in choices)}")
    return value


def role(value):
    """The library's number of the role "k" or "v"."""
    return ROLES[choice(value, "role", tuple(ROLES))]


def _words(shape):
    return "[" + ", ".join("n" if size is None else str(size) for size in shape) + "]"


def tensor(value, what, shape, dtypes, device, rows=False, written=False):
    """value, after checking that it is a tensor on the device of one of these dtypes and this shape
    (None: any size).

    Contiguous as a whole, or, with rows, in its last dimension alone. written: the call writes to
    it, so that no two numbers may share memory."""
    for attribute in ("shape", "dtype", "device", "stride", "data_ptr"):
        if not hasattr(value, attribute):
            raise TypeError(f"{what}: a tensor is needed, not {type(value).__name__}")
    if name_of(value.dtype) not in dtypes:
        raise TypeError(f"{what}: {name_of(value.dtype)} is none of {', '.join(dtypes)}")
    if value.device != device:
        raise ValueError(f"{what}: it is on {value.device}, but the cache is on {device}")
    shapes(tuple(value.shape), what, shape)
    strides(tuple(value.stride()), tuple(value.shape), what, rows, written)
    return value


def shapes(got, what, shape):
    """Compares the shape of an argument; None in shape: any size."""
    if len(got) != len(shape) or any(want not in (None, size) for size, want in zip(got, shape)):
        raise ValueError(f"{what}: the shape {_words(shape)} is needed, not {_words(got)}")


def strides(strides, shape, what, rows, written):
    """Checks strides: contiguous as a whole, or with rows in the last dimension only. Rows that are
    written must not overlap."""
    if 0 in shape:
        return
    if rows:
        if shape[-1] > 1 and strides[-1] != 1:
            raise ValueError(
                f"{what}: the numbers of a row must be contiguous, and are {strides[-1]} apart"
            )
        extent = shape[-1]
        for size, stride in sorted(zip(shape[:-1], strides[:-1]), key=lambda pair: pair[1]):
            if written and size > 1 and stride < extent:
                raise ValueError(f"{what}: rows overlap (strides {strides})")
            extent += (size - 1) * stride
        return
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size > 1 and stride != expected:
            raise ValueError(f"{what}: a contiguous tensor is needed (strides {strides})")
        expected *= size


def table(value, what, shape, device):
    """A block table: int32, its rows contiguous."""
    tensor(value, what, shape, ("int32",), device, rows=True)
    return value


def in_range(value, what, low, high):
    """Reads the numbers of a tensor (waits for the device): all must lie in low .. high - 1."""
    if 0 in tuple(value.shape):
        return
    least, most = int(value.min()), int(value.max())
    if least < low or most >= high:
        raise ValueError(f"{what}: it holds {least} to {most}, but must hold {low} to {high - 1}")
