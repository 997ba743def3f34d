"""ggml's flash attention on its CPU back end as a subject of kvant bench attention, through the C
interface of llama.cpp's libraries.

A graph has one node per layer, as a model's graph has: its threads start once per run and meet at a
barrier between nodes. Tensors are in the order of llama.cpp's cache, in which a token's kv heads
follow each other."""

import ctypes as c
import glob
import math
import os
import time

import numpy as np

from .. import system
from . import cli

# The types that llama.cpp's own programs accept for -ctk and -ctv, with ggml's numbers for them.
STOCK_TYPES = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q5_1": 7,
    "q5_0": 6,
    "q4_1": 3,
    "q4_0": 2,
    "iq4_nl": 20,
}
_F32, _F16 = 0, 1
_CPU = 0  # GGML_BACKEND_DEVICE_TYPE_CPU


class _InitParams(c.Structure):
    _fields_ = [("mem_size", c.c_size_t), ("mem_buffer", c.c_void_p), ("no_alloc", c.c_bool)]


class _ThreadpoolParams(c.Structure):
    _fields_ = [
        ("cpumask", c.c_bool * 512),
        ("n_threads", c.c_int),
        ("prio", c.c_int),
        ("poll", c.c_uint32),
        ("strict_cpu", c.c_bool),
        ("paused", c.c_bool),
    ]


_P, _I64, _SIZE = c.c_void_p, c.c_int64, c.c_size_t
_INT, _FLOAT, _STR = c.c_int, c.c_float, c.c_char_p
_FUNCTIONS = {
    "ggml_version": (_STR, []),
    "ggml_log_set": (None, [_P, _P]),
    "ggml_threadpool_params_init": (None, [c.POINTER(_ThreadpoolParams), _INT]),
    "ggml_backend_load_all_from_path": (None, [_STR]),
    "ggml_backend_dev_by_type": (_P, [_INT]),
    "ggml_backend_dev_backend_reg": (_P, [_P]),
    "ggml_backend_reg_get_proc_address": (_P, [_P, _STR]),
    "ggml_backend_dev_init": (_P, [_P, _STR]),
    "ggml_row_size": (_SIZE, [_INT, _I64]),
    "ggml_blck_size": (_I64, [_INT]),
    "ggml_tensor_overhead": (_SIZE, []),
    "ggml_graph_overhead": (_SIZE, []),
    "ggml_init": (_P, [_InitParams]),
    "ggml_free": (None, [_P]),
    "ggml_new_tensor_2d": (_P, [_P, _INT, _I64, _I64]),
    "ggml_view_3d": (_P, [_P, _P, _I64, _I64, _I64, _SIZE, _SIZE, _SIZE]),
    "ggml_flash_attn_ext": (_P, [_P, _P, _P, _P, _P, _FLOAT, _FLOAT, _FLOAT]),
    "ggml_new_graph": (_P, [_P]),
    "ggml_build_forward_expand": (None, [_P, _P]),
    "ggml_quantize_chunk": (_SIZE, [_INT, _P, _P, _I64, _I64, _I64, _P]),
    "ggml_backend_alloc_ctx_tensors": (_P, [_P, _P]),
    "ggml_backend_buffer_free": (None, [_P]),
    "ggml_backend_tensor_set": (None, [_P, _P, _SIZE, _SIZE]),
    "ggml_backend_tensor_get": (None, [_P, _P, _SIZE, _SIZE]),
    "ggml_backend_graph_compute": (_INT, [_P, _P]),
}
# Sizes in every ggml with the structures and numbers above (0.10 to 0.27): a tensor and the header
# of an object.
_TENSOR_OVERHEAD = 336 + 32
_QUIET = c.CFUNCTYPE(None, _INT, _STR, _P)(lambda level, text, user: None)


class Ggml:
    """llama.cpp's libraries, loaded from a folder, and the CPU back end with a pool of threads that
    sleep between runs. If they spun, as llama.cpp lets them, they would take CPUs from the subjects
    that are measured next."""

    def __init__(self, folder, n_threads):
        self.lib = self._load(folder)
        self.lib.ggml_log_set(c.cast(_QUIET, _P), None)
        self.lib.ggml_backend_load_all_from_path(os.fsencode(folder))
        device = self.lib.ggml_backend_dev_by_type(_CPU)
        if not device:
            cli.fail(f"{folder}: there is no CPU back end for this machine")
        self.backend = self.lib.ggml_backend_dev_init(device, None)
        params = _ThreadpoolParams()
        self.lib.ggml_threadpool_params_init(c.byref(params), n_threads)
        params.poll = 0
        registry = self.lib.ggml_backend_dev_backend_reg(device)
        new = self._function(registry, b"ggml_threadpool_new", _P, c.POINTER(_ThreadpoolParams))
        self._function(registry, b"ggml_backend_cpu_set_threadpool", None, _P, _P)(
            self.backend, new(c.byref(params))
        )

    def _function(self, registry, name, result, *arguments):
        address = self.lib.ggml_backend_reg_get_proc_address(registry, name)
        if not address:
            cli.fail(f"cannot start ggml's CPU back end: it has no {name.decode()}")
        return c.CFUNCTYPE(result, *arguments)(address)

    @staticmethod
    def _load(folder):
        names = (
            sorted(glob.glob(os.path.join(glob.escape(folder or ""), system.LLAMA)))
            if folder
            else []
        )
        if not names:
            cli.fail(
                f"bench attention: no {system.LLAMA} in {folder}, so there is no ggml to compare "
                "with"
                if folder
                else "bench attention: no llama.cpp runtime is named, so there is no ggml "
                "to compare with",
                "--stock none measures only kvant; scripts/fetch.py runtime fetches a runtime; "
                "--runtime or KVANT_RUNTIME names the folder",
            )
        try:
            lib = c.CDLL(
                names[0], mode=c.RTLD_GLOBAL
            )  # back ends that are loaded later look for ggml's symbols there
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(lib, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            cli.fail(f"cannot load {error}")
        if lib.ggml_tensor_overhead() != _TENSOR_OVERHEAD:
            cli.fail(
                f"{folder} has ggml {lib.ggml_version().decode()}, "
                "whose tensors have another layout than in 0.10 to 0.27"
            )
        return lib


class GgmlSubject:
    def __init__(self, inputs, ggml, name):
        self.library, self.k, self.v, self.level = "ggml", name, name, None
        self.ggml, self.type, shape = ggml, STOCK_TYPES[name], inputs.shape
        lib = ggml.lib
        if shape.head_dim % lib.ggml_blck_size(self.type):
            cli.fail(
                f"--stock {name}: its blocks of {lib.ggml_blck_size(self.type)} do not divide "
                f"head_dim {shape.head_dim}"
            )
        self.bytes = (
            2 * lib.ggml_row_size(self.type, shape.n_kv_heads * shape.head_dim) * shape.n_tokens
        )
        self.n_layers = shape.layers(self.bytes)
        # Five tensors per layer (two caches, their views, the result), three further tensors, and
        # the graph.
        room = (5 * self.n_layers + 8) * lib.ggml_tensor_overhead() + lib.ggml_graph_overhead()
        self.context = lib.ggml_init(_InitParams(room, None, True))
        caches = self._build(shape)
        self.buffer = lib.ggml_backend_alloc_ctx_tensors(self.context, ggml.backend)
        if not self.buffer:
            cli.fail("bench attention: out of memory")
        for rows, tensors in zip((inputs.k, inputs.v), caches):
            self._fill(inputs, rows, tensors)
        self._set(self.q, inputs.q)
        self._set(self.mask, inputs.mask)
        self.out = np.empty(inputs.q.shape, np.float32)

    def _build(self, shape):
        lib, context, dim = self.ggml.lib, self.context, shape.head_dim
        row, q_row = lib.ggml_row_size(self.type, dim), 4 * dim
        self.q = lib.ggml_new_tensor_2d(context, _F32, dim * shape.n_heads, shape.n_queries)
        self.mask = lib.ggml_new_tensor_2d(context, _F16, shape.n_tokens, shape.n_queries)
        self.graph = lib.ggml_new_graph(context)

        def heads(tensor, n_rows, n_heads, row):
            """Rows [n_heads, n_rows, dim] of a tensor that has the heads of a token together."""
            return lib.ggml_view_3d(context, tensor, dim, n_rows, n_heads, n_heads * row, row, 0)

        q = heads(self.q, shape.n_queries, shape.n_heads, q_row)
        caches, width = [[], []], dim * shape.n_kv_heads
        for _ in range(self.n_layers):
            for tensors in caches:
                tensors.append(lib.ggml_new_tensor_2d(context, self.type, width, shape.n_tokens))
            k, v = (heads(t[-1], shape.n_tokens, shape.n_kv_heads, row) for t in caches)
            self.last = lib.ggml_flash_attn_ext(
                context, q, k, v, self.mask, 1 / math.sqrt(dim), 0, 0
            )
            lib.ggml_build_forward_expand(self.graph, self.last)
        return caches

    def _set(self, tensor, array):
        self.ggml.lib.ggml_backend_tensor_set(tensor, array.ctypes.data, 0, array.nbytes)

    def _fill(self, inputs, rows, tensors):
        """Quantises the distinct rows once and repeats them until the caches are full."""
        lib, width = self.ggml.lib, inputs.shape.n_kv_heads * inputs.shape.head_dim
        row = lib.ggml_row_size(self.type, width)
        stored = np.empty(inputs.n_rows * row, np.uint8)
        lib.ggml_quantize_chunk(
            self.type, rows.ctypes.data, stored.ctypes.data, 0, inputs.n_rows, width, None
        )
        for tensor in tensors:
            for first in range(0, inputs.shape.n_tokens, inputs.n_rows):
                n = min(inputs.n_rows, inputs.shape.n_tokens - first)
                lib.ggml_backend_tensor_set(tensor, stored.ctypes.data, first * row, n * row)

    def run(self):
        compute = self.ggml.lib.ggml_backend_graph_compute
        start = time.perf_counter()
        status = compute(self.ggml.backend, self.graph)
        seconds = (time.perf_counter() - start) / self.n_layers
        if status:
            cli.fail("ggml could not compute flash attention")
        return seconds

    def check(self):
        self.ggml.lib.ggml_backend_tensor_get(self.last, self.out.ctypes.data, 0, self.out.nbytes)
        if not np.isfinite(self.out).all():
            cli.fail(f"ggml {self.k}: its output is not finite")

    def close(self):
        self.ggml.lib.ggml_backend_buffer_free(self.buffer)
        self.ggml.lib.ggml_free(self.context)
