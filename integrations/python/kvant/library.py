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


_P, _SIZE, _STR, _INT = c.c_void_p, c.c_size_t, c.c_char_p, c.c_int
_U32, _I32, _U64 = c.c_uint32, c.c_int32, c.c_uint64
_SAYS = object()  # a status; the call leaves its reason in kvant_error_message()
_OUT = c.POINTER(c.c_void_p)
_TEXT = [_STR, _SIZE]  # err, errlen
_ROWS = [_P, _SIZE]  # numbers, stride


def _to(struct: Any) -> Any:
    return c.POINTER(struct)


# Result and arguments; a result of None is void, c_int is mostly a status. invoke() adds the
# arguments _TEXT itself.
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    # kvant.h
    "kvant_strerror": (_STR, [_INT]),
    "kvant_error_message": (_STR, []),
    "kvant_version": (_STR, []),
    "kvant_available_cpus": (_U32, []),
    "kvant_set_cpu_level": (_INT, [_INT]),
    "kvant_get_cpu_level": (_INT, []),
    "kvant_cpu_level_name": (_STR, [_INT]),
    "kvant_cpu_level_from_name": (_INT, [_STR, c.POINTER(_INT)]),
    # codec.h
    "kvant_codec_create_calibrated": (_INT, [_STR, _U32, _INT, _U64, _P, _U32, _U32, _OUT, *_TEXT]),
    "kvant_codec_check": (_INT, [_STR, _INT, _P, *_TEXT]),
    "kvant_codec_needs_calibration": (_INT, [_STR, _INT, c.POINTER(_INT), *_TEXT]),
    "kvant_codec_free": (None, [_OUT]),
    "kvant_codec_get_info": (_INT, [_P, _to(s.CodecInfo)]),
    "kvant_codec_encode": (_INT, [_P, _to(s.Affine), *_ROWS, _U32, _U32, _P]),
    "kvant_codec_decode": (_INT, [_P, _to(s.Affine), _P, _U32, _U32, *_ROWS]),
    "kvant_codec_transform_query": (_INT, [_P, _to(s.Affine), _P, _P]),
    "kvant_codec_score": (_INT, [_P, _P, *_ROWS, _U32, _P]),
    "kvant_codec_family_count": (_SIZE, []),
    "kvant_codec_family_get": (_INT, [_SIZE, _to(s.CodecFamily)]),
    # index.h
    "kvant_index_create": (_INT, [_to(s.IndexParams), _OUT, *_TEXT]),
    "kvant_index_free": (None, [_OUT]),
    "kvant_index_train": (_SAYS, [_P, *_ROWS, _SIZE]),
    "kvant_index_add": (_SAYS, [_P, *_ROWS, _SIZE, _P, _U32]),
    "kvant_index_remove": (_INT, [_P, _U64]),
    "kvant_index_search": (_SAYS, [_P, _to(s.IndexQuery), _P, _P]),
    "kvant_index_reconstruct": (_SAYS, [_P, _U64, _P]),
    "kvant_index_save": (_INT, [_P, _STR, *_TEXT]),
    "kvant_index_load": (_INT, [_STR, _OUT, *_TEXT]),
    "kvant_index_view": (_INT, [_STR, _OUT, *_TEXT]),
    "kvant_index_verify": (_SAYS, [_P]),
    "kvant_index_get_info": (_INT, [_P, _to(s.IndexInfo)]),
    "kvant_index_gpu_create": (_INT, [_P, _OUT, *_TEXT]),
    "kvant_index_gpu_free": (None, [_OUT]),
    "kvant_index_gpu_search": (_SAYS, [_P, _to(s.IndexQuery), _P, _P]),
    # tensor.h
    "kvant_tensor_size": (_SAYS, [_to(s.TensorParams), c.POINTER(_SIZE)]),
    "kvant_tensor_create": (_SAYS, [_to(s.TensorParams), _P, _OUT]),
    "kvant_tensor_free": (None, [_OUT]),
    "kvant_tensor_assign": (_INT, [_P, _U32, _U32, _U32]),
    "kvant_tensor_write": (_INT, [_P, _P, _SIZE, *_ROWS, _U32]),
    "kvant_tensor_note_queries": (_INT, [_P, _to(s.Queries), _U32]),
    "kvant_tensor_wants_queries": (_INT, [_P, _SIZE]),
    "kvant_tensor_set_rope": (_SAYS, [_P, _to(s.Rope)]),
    "kvant_tensor_make_codec": (_INT, [_P, _U32, _U32, _P, _OUT]),
    "kvant_tensor_read": (_INT, [_P, _SIZE, _SIZE, *_ROWS]),
    "kvant_tensor_clear_blocks": (_INT, [_P, _U32, _U32]),
    "kvant_tensor_clear": (None, [_P]),
    "kvant_tensor_copy": (_INT, [_P, _U32, _P, _U32, _U32]),
    "kvant_tensor_export_size": (_SIZE, [_P]),
    "kvant_tensor_export": (_INT, [_P, _U32, _P, _SIZE, c.POINTER(_SIZE)]),
    "kvant_tensor_import": (_SAYS, [_P, _U32, _P, _SIZE]),
    "kvant_tensor_set_affine": (_INT, [_P, _to(s.Affine)]),
    "kvant_tensor_get_block": (_INT, [_P, _U32, _U32, _to(s.BlockInfo)]),
    "kvant_tensor_get_info": (_INT, [_P, _to(s.TensorInfo)]),
    # tensor_hooks.h
    "kvant_tensor_half_transform": (_SIZE, [_P, _P, _P, _P]),
    "kvant_tensor_transform_bytes": (_SIZE, [_P, _P]),
    "kvant_tensor_outer_size": (_INT, [_P, _to(s.OuterRecord), c.POINTER(_SIZE)]),
    "kvant_tensor_outer_begin": (_INT, [_P, _to(s.OuterRecord), _P, _SIZE]),
    "kvant_tensor_outer_end": (_INT, [_P, _to(s.OuterRecord), _P, _SIZE]),
    "kvant_tensor_import_record": (_SAYS, [_P, _to(s.BlockSlots), _U32, _P, _SIZE, _U32]),
    "kvant_tensor_read_outer": (
        _SAYS,
        [_P, _to(s.BlockSlots), _U32, _P, _SIZE, _INT, _to(s.OuterBlock), _OUT],
    ),
    # calibration.h
    "kvant_calibration_load": (_INT, [_STR, _OUT, *_TEXT]),
    "kvant_calibration_free": (None, [_OUT]),
    "kvant_calibration_get_info": (_INT, [_P, _to(s.CalibrationInfo)]),
    "kvant_calibration_get_entry": (_INT, [_P, _U32, _U32, _INT, _to(s.CalibrationEntry)]),
    "kvant_calibration_save": (_INT, [_P, _STR, *_TEXT]),
    "kvant_model_fingerprint": (_U64, [_STR]),
    "kvant_calibrator_create": (_INT, [_to(s.CalibratorConfig), _OUT, *_TEXT]),
    "kvant_calibrator_free": (None, [_OUT]),
    "kvant_calibrator_add_rows": (_INT, [_P, _U32, _INT, _U32, _U32, *_ROWS, _SIZE]),
    "kvant_calibrator_add_queries": (_INT, [_P, _U32, _U32, _U32, *_ROWS, _SIZE]),
    "kvant_calibrator_add_attention": (
        _INT,
        [_P, _U32, _U32, _U32, _U32, _to(s.CalibratorAttention)],
    ),
    "kvant_calibrator_add_moments": (_INT, [_P, _U32, _INT, _to(s.CalibratorMoments)]),
    "kvant_calibrator_cluster": (_INT, [_P, c.POINTER(_U32)]),
    "kvant_calibrator_finish": (_INT, [_P, _OUT]),
    # settings.h
    "kvant_settings_create": (_INT, [_to(s.SettingsConfig), _OUT, *_TEXT]),
    "kvant_settings_load": (_INT, [_STR, _OUT, *_TEXT]),
    "kvant_settings_save": (_INT, [_P, _STR, *_TEXT]),
    "kvant_settings_free": (None, [_OUT]),
    "kvant_settings_get_info": (_INT, [_P, _to(s.SettingsInfo)]),
    "kvant_settings_get_layer": (_INT, [_P, _U32, _INT, _to(s.SettingsLayer)]),
    "kvant_settings_load_calibration": (_INT, [_P, _STR, _OUT, *_TEXT]),
    "kvant_settings_check": (_INT, [_P, _P, *_TEXT]),
    "kvant_preset_get": (_INT, [_STR, _INT, _to(s.Preset)]),
    # scheme.h
    "kvant_scheme_create": (_SAYS, [_to(s.SchemeParams), _OUT]),
    "kvant_scheme_free": (None, [_OUT]),
    "kvant_scheme_codecs": (_SAYS, [_P, _to(s.SchemeLocation), c.POINTER(_OUT)]),
    "kvant_scheme_exact": (_SAYS, [_P, c.c_uint64, c.c_uint32, _to(s.ExactPart)]),
    "kvant_scheme_true_bits": (_SAYS, [_P, _to(s.SchemeModel), c.POINTER(c.c_double)]),
    "kvant_scheme_get_info": (_INT, [_P, _to(s.SchemeInfo)]),
    # attention.h
    "kvant_attention_workspace": (_SAYS, [_P, _P, _to(s.AttentionProblem), c.POINTER(_SIZE)]),
    "kvant_attention": (_SAYS, [_P, _P, _to(s.AttentionProblem), _P, _SIZE]),
    # cache.h
    "kvant_cache_create": (_SAYS, [_to(s.CacheParams), _OUT]),
    "kvant_cache_free": (None, [_OUT]),
    "kvant_cache_append": (_SAYS, [_P, _U32, _I32, _P, _P, _U32]),
    "kvant_cache_append_batch": (_SAYS, [_P, _U32, c.POINTER(_I32), _U32, _P, _P, _U32]),
    "kvant_cache_note_queries": (_SAYS, [_P, _U32, _to(s.Queries)]),
    "kvant_cache_wants_queries": (_INT, [_P, _U32, _SIZE]),
    "kvant_cache_set_rope": (_SAYS, [_P, _U32, _to(s.Rope)]),
    "kvant_cache_attention": (_SAYS, [_P, _U32, _I32, _to(s.AttentionProblem)]),
    "kvant_cache_attend_batch": (_SAYS, [_P, _U32, c.POINTER(_I32), _U32, _P, _P, _U32]),
    "kvant_cache_read": (_SAYS, [_P, _U32, _I32, _U32, _U32, _P, _P]),
    "kvant_steps_begin": (_SAYS, [_P, c.POINTER(_I32), _U32, _to(s.StepsInfo)]),
    "kvant_steps_next": (_SAYS, [_P]),
    "kvant_cache_step": (_SAYS, [_P, _U32, _to(s.Step)]),
    "kvant_sequence_create": (_I32, [_P]),
    "kvant_sequence_fork": (_I32, [_P, _I32]),
    "kvant_sequence_free": (None, [_P, _I32]),
    "kvant_sequence_length": (_U32, [_P, _I32, _U32]),
    "kvant_sequence_truncate": (_SAYS, [_P, _I32, _U32]),
    "kvant_sequence_drop": (_SAYS, [_P, _I32, _U32]),
    "kvant_sequence_export_size": (_SAYS, [_P, _I32, _U32, _U32, c.POINTER(_SIZE)]),
    "kvant_sequence_export": (_SAYS, [_P, _I32, _U32, _U32, _P, _SIZE]),
    "kvant_sequence_import": (_SAYS, [_P, _I32, _P, _SIZE]),
    "kvant_cache_get_info": (_INT, [_P, _to(s.CacheInfo)]),
    # cuda.h
    "kvant_cuda_available": (_INT, [*_TEXT]),
    "kvant_cuda_codec_from": (_INT, [_P, _OUT, *_TEXT]),
    "kvant_cuda_codec_create_open": (_INT, [_P, _OUT]),
    "kvant_cuda_codec_free": (None, [_OUT]),
    "kvant_cuda_codec_get_info": (_INT, [_P, _to(s.CodecInfo)]),
    "kvant_cuda_codec_tables": (_INT, [_P, _to(s.CudaTables)]),
    "kvant_cuda_transform_queries": (_INT, [_to(s.CudaQueryArgs), _P]),
    "kvant_cuda_append": (_INT, [_to(s.CudaAppendArgs), _P]),
    "kvant_cuda_seal": (_INT, [_to(s.CudaSealArgs), _P]),
    "kvant_cuda_attention_check": (_INT, [_P, _P, *_TEXT]),
    "kvant_cuda_attention_workspace": (_SIZE, [_U32]),
    "kvant_cuda_attention": (_INT, [_to(s.CudaAttentionArgs), _P]),
    "kvant_cuda_decode": (_INT, [_to(s.CudaDecodeArgs), _P]),
    # cuda_kernels.h
    "kvant_cuda_kernel_append": (_INT, [_to(s.CudaKernelAppendArgs), _P]),
    "kvant_cuda_kernel_attention": (_INT, [_to(s.CudaKernelAttentionArgs), _P]),
    "kvant_cuda_exact_step": (_INT, [_to(s.CudaExactArgs), _P]),
    "kvant_cuda_seal_rows": (_INT, [_to(s.CudaSealRowsArgs), _P]),
    "kvant_cuda_limit_shared_memory": (None, [_SIZE]),
}

_WITH_TEXT = {name for name, (_, types) in _FUNCTIONS.items() if types[-2:] == _TEXT}

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
            for function, (result, arguments) in _FUNCTIONS.items():
                bound = getattr(lib, function)
                bound.restype = _INT if result is _SAYS else result
                bound.argtypes = arguments
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
    if name in _WITH_TEXT:
        text = c.create_string_buffer(512)
        status = function(*arguments, text, len(text))
        check(what, status, text.value)
    elif status := function(*arguments):
        says = _FUNCTIONS[name][0] is _SAYS
        check(what, status, library().kvant_error_message() if says else b"")


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
