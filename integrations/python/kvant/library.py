"""Finds libkvant, declares its functions and makes an exception of an error status. Knows nothing
of arrays and tensors.

ctypes releases Python's lock while a function of the library runs, so several threads compute at
once. The headers say which calls may run at the same time."""

from __future__ import annotations

import ctypes as c
import os
import pathlib
import threading
from typing import Any

from . import structs as s
from .system import LIBRARY, NAMES

PAGE_TOKENS = 64
PAGE_ALIGN = 64
MAX_HEAD_DIM = 512
ROLES = {"k": 0, "v": 1}

_UNSUPPORTED = 30  # KVANT_ERR_UNSUPPORTED


class Error(RuntimeError):
    """A call of the library failed. status is its kvant_status (include/kvant/kvant.h), reason the
    library's words."""

    def __init__(self, what: str, status: int, reason: str) -> None:
        super().__init__(f"{what}: {reason}")
        self.status, self.reason = status, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self).removesuffix(f": {self.reason}"), self.status, self.reason)


# Calls of these leave the reason of a failure in kvant_error_message().
_SAYS = {
    f"kvant_{name}"
    for name in """
        index_train index_add index_search index_reconstruct index_verify index_gpu_search
        tensor_size tensor_create tensor_set_rope tensor_import tensor_import_record
        tensor_read_outer scheme_create scheme_codecs scheme_exact scheme_true_bits
        attention_workspace attention cache_create cache_append cache_append_batch
        cache_note_queries cache_set_rope cache_attention cache_attend_batch cache_read
        steps_begin steps_next cache_step sequence_truncate sequence_drop sequence_export_size
        sequence_export sequence_import
    """.split()
}

_library: Any = None
_loading = threading.Lock()


def _names() -> list[str]:
    """The paths where libkvant may be, in order. If KVANT_LIBRARY is set, only it counts. Otherwise
    they are the package's folder (installed wheels), the build folder of the source tree that has
    this package, and the loader's search."""
    named = os.environ.get("KVANT_LIBRARY")
    if named:
        return [named]
    here = pathlib.Path(__file__).resolve().parent
    places = [here / LIBRARY, here / NAMES[-1], here.parents[2] / "build" / LIBRARY]
    return [*(str(path) for path in places if path.is_file()), *NAMES]


def _open() -> Any:
    names, reason = _names(), ""
    for name in names:
        try:
            lib = c.CDLL(name)
        except OSError as error:
            reason = str(error)
            continue
        try:
            for function, (result, arguments) in s.FUNCTIONS.items():
                bound = getattr(lib, function)
                bound.restype, bound.argtypes = result, arguments
        except AttributeError as error:
            raise Error(
                "loading libkvant", _UNSUPPORTED, f"{error}: {name} is of another release"
            ) from None
        return lib
    raise Error(
        "loading libkvant",
        _UNSUPPORTED,
        f"{reason}; build it (make) or set KVANT_LIBRARY to its path",
    )


def _force_level(lib: Any, name: str) -> None:
    level = c.c_int()
    if lib.kvant_cpu_level_from_name(name.encode(), c.byref(level)):
        raise ValueError(f"CPU level: there is none called {name!r}")
    if lib.kvant_set_cpu_level(level):
        raise Error(
            "CPU level",
            _UNSUPPORTED,
            f"this machine or this build of libkvant has no level {name!r}",
        )


def library() -> Any:
    """libkvant with its functions declared, opened by the first call. Error when there is none or
    it is of another release. libkvant itself opens libkvant_cuda.so, in its own folder or where
    KVANT_CUDA_LIBRARY says. KVANT_CPU forces a CPU level, as set_cpu_level does."""
    global _library
    if _library is None:
        with _loading:
            if _library is None:
                made = _open()
                if os.environ.get("KVANT_CPU"):
                    _force_level(made, os.environ["KVANT_CPU"])
                _library = made
    return _library


def set_cpu_level(name: str) -> None:
    """Forces an instruction set for the whole process: "auto", "c", "avx2" and others
    (kvant/kvant.h). Before other threads use the library. ValueError for an unknown name, Error
    when the machine lacks it."""
    _force_level(library(), name)


def cpu_level() -> str:
    """The level in use."""
    return library().kvant_cpu_level_name(library().kvant_get_cpu_level()).decode()


def version() -> str:
    """The version of the loaded library, "major.minor.patch"."""
    return library().kvant_version().decode()


def check(what: str, status: int, reason: bytes = b"") -> None:
    """Raises Error(what: reason) unless status is 0. Without a reason the message has the status
    only."""
    if status:
        words = (reason or library().kvant_strerror(status)).decode(errors="replace")
        raise Error(what, status, words.removeprefix(f"{what}: "))


def invoke(what: str, name: str, *arguments: Any) -> None:
    """Calls a function that returns a status, and raises Error(what: reason) unless it is 0. The
    reason is the text that the call writes to its argument err, which invoke() passes, or
    kvant_error_message() of calls that set it. For other calls an older message would mislead, so
    the message has the status only."""
    function = getattr(library(), name)
    if s.FUNCTIONS[name][1][-2:] == [c.c_char_p, c.c_size_t]:  # err, errlen
        text = c.create_string_buffer(512)
        status = function(*arguments, text, len(text))
        check(what, status, text.value)
    elif status := function(*arguments):
        check(what, status, library().kvant_error_message() if name in _SAYS else b"")


def facts(what: str, name: str, struct: Any, *arguments: Any) -> dict[str, Any]:
    """The fields of a struct that a function fills, which is its last argument (Struct.plain)."""
    found = struct.new()
    invoke(what, name, *arguments, found)
    return found.plain()


def c_text(value: Any, what: str) -> bytes | None:
    """A string or a path as C takes it; None stays None."""
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{what}: a string or a path is needed, not {value!r}")
    encoded = os.fsencode(value)
    if b"\0" in encoded:
        raise ValueError(f"{what}: {value!r} holds a zero byte")
    return encoded


class Owned:
    """An object of the library. It is freed with _free when Python's object goes. It cannot be
    copied or pickled, because its state is in C; only a Codec can, because its arguments make it
    again.

    `keep`: objects that must live as long (codecs of a tensor, the scheme of borrowed codecs).
    `free`: "" for borrowed objects."""

    def __init__(self, free: str, keep: Any = None) -> None:
        self._library, self._handle, self._free, self._keep = library(), c.c_void_p(), free, keep

    @property
    def handle(self) -> int | None:
        """The pointer, for calls of the C interface."""
        return self._handle.value

    def __reduce__(self) -> Any:
        raise TypeError(f"{type(self).__name__}: an object of libkvant cannot be copied or pickled")

    def __del__(self, by_reference: Any = c.byref) -> None:  # modules are empty when Python ends
        if getattr(self, "_handle", None) and getattr(self, "_free", ""):
            getattr(self._library, self._free)(by_reference(self._handle))
