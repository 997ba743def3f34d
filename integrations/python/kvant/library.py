"""The C interface of kvant/cuda.h as ctypes sees it: structures, functions, errors. No tensor is known here."""

import ctypes as c
import os

OK = 0
STATUS = {
    10: "invalid argument",
    20: "codec spec not understood",
    30: "not available",
    40: "out of memory",
    80: "the CUDA runtime refused the call, or the library has no code for this device",
}
PAGE_TOKENS = 64
ROLE_K, ROLE_V = 0, 1


class Error(RuntimeError):
    """A call of the library failed; status is its kvant_status."""

    def __init__(self, what, status, message=""):
        super().__init__(f"{what}: {message or STATUS.get(status, f'status {status}')}")
        self.status = status


class CodecInfo(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("spec", c.c_char_p),
        ("source", c.c_char_p),
        ("head_dim", c.c_uint32),
        ("role", c.c_int),
        ("center", c.c_int),
        ("norm", c.c_int),
        ("sink_tokens", c.c_uint32),
        ("recent_tokens", c.c_uint32),
        ("block_tokens", c.c_uint32),
        ("bits", c.c_uint32),
        ("code_bytes", c.c_size_t),
        ("metadata_offset", c.c_size_t),
        ("metadata_bytes", c.c_size_t),
        ("page_bytes", c.c_size_t),
        ("true_bits", c.c_double),
        ("nominal_bits", c.c_double),
        ("fingerprint", c.c_uint64),
    ]


class Pages(c.Structure):
    _fields_ = [("base", c.c_void_p), ("block_stride", c.c_size_t), ("head_stride", c.c_size_t)]


class Rows(c.Structure):
    _fields_ = [
        ("codec", c.c_void_p),
        ("pages", Pages),
        ("rows", c.c_void_p),
        ("token_stride", c.c_size_t),
        ("head_stride", c.c_size_t),
        ("center", c.c_void_p),
        ("scale", c.c_void_p),
        ("weights", c.c_void_p),
    ]


class AppendArgs(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("k", Rows),
        ("v", Rows),
        ("type", c.c_int),
        ("n_tokens", c.c_uint32),
        ("n_kv_heads", c.c_uint32),
        ("slots", c.c_void_p),
        ("refused", c.c_void_p),
    ]


class AttentionArgs(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("k_codec", c.c_void_p),
        ("v_codec", c.c_void_p),
        ("k", Pages),
        ("v", Pages),
        ("k_open", Pages),
        ("v_open", Pages),
        ("block_table", c.c_void_p),
        ("table_stride", c.c_size_t),
        ("blocks_per_row", c.c_uint32),
        ("lengths", c.c_void_p),
        ("batch", c.c_uint32),
        ("n_heads", c.c_uint32),
        ("n_kv_heads", c.c_uint32),
        ("type", c.c_int),
        ("q", c.c_void_p),
        ("q_batch_stride", c.c_size_t),
        ("q_head_stride", c.c_size_t),
        ("out", c.c_void_p),
        ("out_batch_stride", c.c_size_t),
        ("out_head_stride", c.c_size_t),
        ("lse", c.c_void_p),
        ("scale", c.c_float),
        ("v_center", c.c_void_p),
        ("k_scale", c.c_void_p),
        ("v_scale", c.c_void_p),
        ("workspace", c.c_void_p),
        ("workspace_bytes", c.c_size_t),
        ("query_tokens", c.c_uint32),
        ("query_starts", c.c_void_p),
        ("q_token_stride", c.c_size_t),
        ("out_token_stride", c.c_size_t),
        ("causal", c.c_uint32),
        ("window", c.c_uint32),
        ("logit_softcap", c.c_float),
        ("max_bias", c.c_float),
        ("mask", c.c_void_p),
        ("mask_token_stride", c.c_size_t),
        ("sinks", c.c_void_p),
    ]


class SealPages(c.Structure):
    _fields_ = [("codec", c.c_void_p), ("open", Pages), ("sealed", Pages)]


class SealArgs(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("k", SealPages),
        ("v", SealPages),
        ("n_blocks", c.c_uint32),
        ("n_kv_heads", c.c_uint32),
        ("from_", c.c_void_p),
        ("to", c.c_void_p),
        ("tokens", c.c_void_p),
        ("refused", c.c_void_p),
    ]


class DecodeArgs(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("codec", c.c_void_p),
        ("pages", Pages),
        ("blocks", c.c_void_p),
        ("n_blocks", c.c_uint32),
        ("n_kv_heads", c.c_uint32),
        ("type", c.c_int),
        ("out", c.c_void_p),
        ("token_stride", c.c_size_t),
        ("head_stride", c.c_size_t),
        ("center", c.c_void_p),
        ("scale", c.c_void_p),
        ("inverse_weights", c.c_void_p),
        ("to", c.c_void_p),
        ("transformed", c.c_uint32),
    ]


_library = None

_FUNCTIONS = {
    "kvant_cuda_available": (c.c_int, [c.c_char_p, c.c_size_t]),
    "kvant_cuda_codec_create": (
        c.c_int,
        [c.c_char_p, c.c_uint32, c.c_int, c.c_uint64, c.POINTER(c.c_void_p), c.c_char_p, c.c_size_t],
    ),
    "kvant_cuda_codec_create_open": (c.c_int, [c.c_void_p, c.POINTER(c.c_void_p)]),
    "kvant_cuda_codec_free": (None, [c.POINTER(c.c_void_p)]),
    "kvant_cuda_codec_get_info": (c.c_int, [c.c_void_p, c.POINTER(CodecInfo)]),
    "kvant_cuda_append": (c.c_int, [c.POINTER(AppendArgs), c.c_void_p]),
    "kvant_cuda_seal": (c.c_int, [c.POINTER(SealArgs), c.c_void_p]),
    "kvant_cuda_attention_check": (c.c_int, [c.c_void_p, c.c_void_p, c.c_char_p, c.c_size_t]),
    "kvant_cuda_attention_workspace": (c.c_size_t, [c.c_uint32]),
    "kvant_cuda_attention": (c.c_int, [c.POINTER(AttentionArgs), c.c_void_p]),
    "kvant_cuda_limit_shared_memory": (None, [c.c_size_t]),
    "kvant_cuda_decode": (c.c_int, [c.POINTER(DecodeArgs), c.c_void_p]),
}


def library():
    """libkvant.so: KVANT_LIBRARY names it, otherwise the loader's search path is used. libkvant opens libkvant_cuda.so:
    beside itself, or where KVANT_CUDA_LIBRARY says."""
    global _library
    if _library is None:
        name = os.environ.get("KVANT_LIBRARY") or "libkvant.so"
        try:
            lib = c.CDLL(name)
            for function, (result, arguments) in _FUNCTIONS.items():
                bound = getattr(lib, function)
                bound.restype, bound.argtypes = result, arguments
        except OSError as error:
            raise Error("loading libkvant", 30, f"{error}; set KVANT_LIBRARY to its path") from None
        except AttributeError as error:
            raise Error("loading libkvant", 30, f"{error}: {name} is of another release") from None
        _library = lib
    return _library


def check(what, status, message=""):
    if status != OK:
        raise Error(what, status, message)
