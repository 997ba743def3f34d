"""kvant bench cuda: the time of attention on an NVIDIA GPU, compared with a copy in the same run.

A run replays a CUDA graph that holds this one call. Before each run, memory of four times the
second-level cache is overwritten, so no page is left in the cache, as in a model that reads its
weights. Pages are encoded on the CPU, which writes the same bytes as the GPU, and are in random
order."""

import ctypes as c
import math
import os
import statistics
import sys
from typing import NamedTuple

import numpy as np

import kvant
from kvant import library, system
from kvant import structs as s

from . import benchmarks, cli
from .table import Column

USUAL = (
    "int-4 bdr-4 turboquant-4 turboquant-3 turboquant-2 int-2 kivi-2 innerq-small octopus-4 "
    "hqmq-s96r4 trellis-4 trellis-3 trellis-2"
).split()
PAGE = library.PAGE_TOKENS
BF16 = 2  # KVANT_CUDA_BF16

COMMAND = cli.Command(
    name="bench cuda",
    usage="[-k SPEC [-v SPEC]]... [-b BATCH] [--heads N] [--kv-heads N] [-d DIM] [-n TOKENS]",
    about="""\
Measures attention on an NVIDIA GPU over compressed pages in random order: bf16 queries
and outputs, rotation included. Needs NumPy.""",
    options=cli.options(
        benchmarks.CODEC_OPTIONS
        + """\
  -b, --batch N           sequences (default 1)
      --heads N           query heads (default 32)
      --kv-heads N        kv heads (default 8)
  -d, --head-dim N        numbers of a row: a multiple of 16 (default 128)
  -n, --tokens N,N        tokens of each sequence (default 32768,131072)
      --query-tokens N    query tokens of each sequence, its last ones, causal (default 1)
  -r, --rounds N          replays, of which the median is given (default 31)
      --device N          number of the GPU (default 0)
      --library FILE      libkvant_cuda.so (default: $KVANT_CUDA_LIBRARY, next to libkvant,
                          then where the system looks)
      --json              one JSON array of flat objects
"""
    ),
    notes="""\
GB/s are bytes of keys and values as they are stored; 'of copy' is their share of the bytes
that a copy in the same run reads and writes. 'error' is the error of one head, against double
precision over the decoded pages. bench/cuda/ has the comparison with PyTorch's flash and cuDNN
attention. Needs libkvant_cuda (`make cuda`) and a driver. Ctrl-C prints all complete results.

example:
  kvant bench cuda -k trellis-4 -k int-4 -b 8 -n 32768""",
)
FIELDS = {
    "batch": ("batch", cli.whole, 1, 4096),
    "heads": ("heads", cli.whole, 1, 1024),
    "kv-heads": ("kv_heads", cli.whole, 1, 128),
    "head-dim": ("dim", cli.whole, 1, library.MAX_HEAD_DIM),
    "tokens": ("tokens", benchmarks.numbers, 1, 1 << 22),
    "query-tokens": ("query_tokens", cli.whole, 1, 1 << 16),
    "rounds": ("rounds", cli.whole, 1, 1001),
    "device": ("device", cli.whole, 0, 1023),
    "json": ("json",),
}


class Shape(NamedTuple):
    batch: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_tokens: int  # of each sequence
    query_tokens: int  # its last ones


class Gpu:
    """The NVIDIA driver, found at run time, and one device. Work runs on the calling thread's
    stream, which the driver orders with the copies of upload and download."""

    STREAM = c.c_void_p(2)  # CU_STREAM_PER_THREAD
    ARGUMENTS = {  # of functions that take addresses and sizes
        "cuMemAlloc_v2": [c.c_void_p, c.c_size_t],
        "cuMemFree_v2": [c.c_uint64],
        "cuMemsetD8Async": [c.c_uint64, c.c_ubyte, c.c_size_t, c.c_void_p],
        "cuMemcpyDtoDAsync_v2": [c.c_uint64, c.c_uint64, c.c_size_t, c.c_void_p],
        "cuMemcpyHtoD_v2": [c.c_uint64, c.c_void_p, c.c_size_t],
        "cuMemcpyDtoH_v2": [c.c_void_p, c.c_uint64, c.c_size_t],
    }
    L2_BYTES = 38  # CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE

    def __init__(self, ordinal):
        try:
            self._driver = c.CDLL(system.CUDA_DRIVER)
        except OSError as error:
            cli.fail(f"no NVIDIA driver: {error}")
        for name, types in self.ARGUMENTS.items():
            getattr(self._driver, name).argtypes = types
        device, count, number, context = c.c_int(), c.c_int(), c.c_int(), c.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGetCount", c.byref(count))
        if ordinal >= count.value:
            cli.fail(f"no device {ordinal}: this machine has {count.value}")
        self.call("cuDeviceGet", c.byref(device), ordinal)
        name = c.create_string_buffer(128)
        self.call("cuDeviceGetName", name, len(name), device)
        self.name = name.value.decode()
        self.call("cuDriverGetVersion", c.byref(number))
        self.version = number.value // 10 / 100  # 13000 is 13.0
        self.call("cuDeviceGetAttribute", c.byref(number), self.L2_BYTES, device)
        self.call("cuDevicePrimaryCtxRetain", c.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self._begin, self._end = self._event(), self._event()
        self._flush_bytes = max(4 * number.value, 256 << 20)
        self._flush = self.allocate(self._flush_bytes)

    def call(self, name, *arguments):
        """Calls a function of the driver; an error ends the command."""
        status = getattr(self._driver, name)(*arguments)
        if status:
            text = c.c_char_p()
            self._driver.cuGetErrorString(status, c.byref(text))
            cli.fail(f"{name}: {(text.value or b'an error without words').decode()} ({status})")

    def _event(self):
        event = c.c_void_p()
        self.call("cuEventCreate", c.byref(event), 0)
        return event

    def free_bytes(self):
        free, total = c.c_size_t(), c.c_size_t()
        self.call("cuMemGetInfo_v2", c.byref(free), c.byref(total))
        return free.value

    def allocate(self, n_bytes):
        """The address of new device memory, aligned to 256 bytes and not initialised."""
        address = c.c_uint64()
        self.call("cuMemAlloc_v2", c.byref(address), n_bytes)
        return address.value

    def release(self, address):
        self.call("cuMemFree_v2", address)

    def fill(self, address, byte, n_bytes):
        self.call("cuMemsetD8Async", address, byte, n_bytes, self.STREAM)

    def copy(self, to, source, n_bytes):
        self.call("cuMemcpyDtoDAsync_v2", to, source, n_bytes, self.STREAM)

    def upload(self, address, array):
        array = np.ascontiguousarray(array)
        self.call("cuMemcpyHtoD_v2", address, array.ctypes.data, array.nbytes)

    def download(self, array, address):
        self.call("cuMemcpyDtoH_v2", array.ctypes.data, address, array.nbytes)
        return array

    def record(self, enqueue):
        """Returns a graph of the work that enqueue() puts on the stream, ready to be launched."""
        graph, executable = c.c_void_p(), c.c_void_p()
        self.call("cuStreamBeginCapture_v2", self.STREAM, 1)  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        enqueue()
        self.call("cuStreamEndCapture", self.STREAM, c.byref(graph))
        self.call("cuGraphInstantiateWithFlags", c.byref(executable), graph, c.c_ulonglong(0))
        self.call("cuGraphDestroy", graph)
        return executable

    def time(self, cold, enqueue):
        """Seconds that the GPU needs for the work that enqueue() puts on the stream. `cold`: its
        cache is emptied first."""
        milliseconds = c.c_float()
        if cold:
            self.fill(self._flush, 0x5A, self._flush_bytes)
        self.call("cuEventRecord", self._begin, self.STREAM)
        enqueue()
        self.call("cuEventRecord", self._end, self.STREAM)
        self.call("cuEventSynchronize", self._end)
        self.call("cuEventElapsedTime", c.byref(milliseconds), self._begin, self._end)
        return milliseconds.value / 1e3

    def copy_bandwidth(self, rounds):
        """Bytes per second that a copy reads and writes: the median. It copies 1 GiB, or less if
        less memory is free."""
        n_bytes = min(self.free_bytes() // 4 // 512 * 512, 1 << 30)
        source, to = self.allocate(n_bytes), self.allocate(n_bytes)
        self.fill(source, 0x5A, n_bytes)
        seconds = [self.time(False, lambda: self.copy(to, source, n_bytes)) for _ in range(rounds)]
        self.release(source)
        self.release(to)
        return 2 * n_bytes / statistics.median(seconds)


def work_of(shape):
    return benchmarks.work_of(
        shape.query_tokens, shape.n_tokens, shape.batch * shape.n_heads, shape.head_dim
    )


class Attention:
    """kvant_cuda_attention over one cache in the memory of the GPU."""

    def __init__(self, gpu, shape, k, v):
        self.gpu, self.shape, self.k, self.v = gpu, shape, k, v
        self.work, self.label = work_of(shape), k
        self._memory, self._graph, self._cuda = None, None, []
        self._codecs = [
            kvant.Codec(spec, shape.head_dim, role, seed=1) for spec, role in ((k, "k"), (v, "v"))
        ]
        self.pages = -(-shape.n_tokens // PAGE)  # of a sequence
        n_rows = min(self.pages * PAGE, benchmarks.DISTINCT_ROWS)
        rows = [
            benchmarks.normal(1 + role, n_rows, shape.n_kv_heads, shape.head_dim)
            for role in range(2)
        ]
        self._query = (
            benchmarks.normal(
                3, shape.batch, shape.query_tokens, shape.n_heads, shape.head_dim
            ).view(np.uint32)
            >> 16
        )  # bf16
        # [block, kv head, byte]; a block of the pool has the K pages of all kv heads, then the V
        # pages.
        self._distinct = [
            np.stack([codec.encode(x[:, head]) for head in range(shape.n_kv_heads)], axis=1)
            for codec, x in zip(self._codecs, rows)
        ]
        self.bytes = (
            shape.batch
            * self.pages
            * shape.n_kv_heads
            * sum(codec.page_bytes for codec in self._codecs)
        )
        self._table = (
            np.random.default_rng(4).permutation(shape.batch * self.pages).astype(np.int32)
        )
        try:
            self._make_codecs()
            self._make_memory()
            self._enqueue()  # outside of the graph: it loads the kernel
            self._graph = gpu.record(self._enqueue)
        except BaseException:
            self.close()
            raise

    def _make_codecs(self):
        for codec in self._codecs:
            made = c.c_void_p()
            library.invoke(codec.spec, "kvant_cuda_codec_from", codec.handle, made)
            self._cuda.append(made)
        library.invoke(f"{self.k}, {self.v}", "kvant_cuda_attention_check", *self._cuda)

    def _make_memory(self):
        """Allocates one span for everything and compares it with the free memory first, so that
        nothing is half done when it is not enough."""
        shape, n_blocks = self.shape, self._table.size
        blocks = np.concatenate([pages.reshape(len(pages), -1) for pages in self._distinct], axis=1)
        self._block_bytes = blocks.shape[1]
        self._n_workspace = library.library().kvant_cuda_attention_workspace(shape.head_dim)
        query = self._query.astype(np.uint16)
        sizes = [
            n_blocks * self._block_bytes,
            query.nbytes,
            query.nbytes,
            self._n_workspace,
            self._table.nbytes,
            4 * shape.batch,
        ]
        starts = np.cumsum([0] + [-(-size // 256) * 256 for size in sizes]).tolist()
        free = self.gpu.free_bytes()
        if starts[-1] + (64 << 20) > free:  # room for graphs and kernels
            cli.fail(
                f"the cache takes {sizes[0] >> 20} MiB, "
                f"but the device has only {free >> 20} MiB free",
                "give fewer --tokens or a smaller --batch",
            )
        self._memory = self.gpu.allocate(starts[-1])
        self._pool, self._q, self._out, self._workspace, self._blocks, self._lengths = (
            self._memory + at for at in starts[:-1]
        )
        for at in range(
            0, n_blocks, len(blocks)
        ):  # the distinct blocks, again and again until the pool is full
            n_bytes = min(len(blocks), n_blocks - at) * self._block_bytes
            if at == 0:
                self.gpu.upload(self._pool, blocks[:n_blocks])
            else:
                self.gpu.copy(self._pool + at * self._block_bytes, self._pool, n_bytes)
        self.gpu.upload(self._q, query)
        self.gpu.upload(self._blocks, self._table)
        self.gpu.upload(self._lengths, np.full(shape.batch, shape.n_tokens, np.int32))
        self.gpu.fill(self._out, 0xFF, query.nbytes)
        self.gpu.fill(self._workspace, 0, self._n_workspace)

    def _enqueue(self):
        shape, row = self.shape, self.shape.n_heads * self.shape.head_dim
        k_bytes, v_bytes = (codec.page_bytes for codec in self._codecs)
        args = s.CudaAttentionArgs.new(
            k_codec=self._cuda[0],
            v_codec=self._cuda[1],
            k=s.CudaPages(self._pool, self._block_bytes, k_bytes),
            v=s.CudaPages(self._pool + shape.n_kv_heads * k_bytes, self._block_bytes, v_bytes),
            block_table=self._blocks,
            table_stride=self.pages,
            blocks_per_row=self.pages,
            lengths=self._lengths,
            batch=shape.batch,
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            type=BF16,
            q=self._q,
            q_batch_stride=shape.query_tokens * row,
            q_head_stride=shape.head_dim,
            out=self._out,
            out_batch_stride=shape.query_tokens * row,
            out_head_stride=shape.head_dim,
            scale=1 / math.sqrt(shape.head_dim),
            workspace=self._workspace,
            workspace_bytes=self._n_workspace,
            query_tokens=shape.query_tokens,
            q_token_stride=row,
            out_token_stride=row,
            causal=shape.query_tokens > 1,
        )
        library.invoke("attention", "kvant_cuda_attention", args, self.gpu.STREAM)

    def run(self):
        return self.gpu.time(
            True, lambda: self.gpu.call("cuGraphLaunch", self._graph, self.gpu.STREAM)
        )

    def check(self):
        """The error ||out - want|| / ||want|| of the first head of the first sequence's last token.
        want is softmax in double precision over the decoded pages."""
        dim = self.shape.head_dim
        k, v = (
            codec.decode(np.ascontiguousarray(pages[:, 0])).astype(np.float64)
            for codec, pages in zip(self._codecs, self._distinct)
        )
        q = (self._query[0, -1, 0] << 16).view(np.float32).astype(np.float64)
        rows = self._table[: self.pages, None] % len(self._distinct[0]) * PAGE + np.arange(PAGE)
        counts = np.bincount(
            rows.ravel()[: self.shape.n_tokens], minlength=len(k)
        )  # how often a row is in the sequence
        scores = k @ q / math.sqrt(dim)
        weights = counts * np.exp(scores - scores[counts > 0].max())
        want = weights @ v / weights.sum()
        row = (self.shape.query_tokens - 1) * self.shape.n_heads * dim
        out = self.gpu.download(np.empty(dim, np.uint16), self._out + 2 * row)
        out = (out.astype(np.uint32) << 16).view(np.float32)
        self.error = float(np.linalg.norm(out - want) / np.linalg.norm(want))

    def close(self):
        if self._graph is not None:
            self.gpu.call("cuGraphExecDestroy", self._graph)
        if self._memory is not None:
            self.gpu.release(self._memory)
        for codec in self._cuda:
            library.library().kvant_cuda_codec_free(c.byref(codec))


COLUMNS = [
    Column("device", None),
    Column("driver_cuda", None, 1),
    Column("k", "K"),
    Column("v", "V"),
    Column("batch", "batch", 0),
    Column("heads", "heads", 0),
    Column("kv_heads", "kv_heads", 0),
    Column("head_dim", "head_dim", 0),
    Column("tokens", "tokens", 0),
    Column("query_tokens", "query", 0),
    Column("rounds", None, 0),
    Column("bytes", None, 0),
    Column("microseconds", "us", 1),
    Column("gbytes_per_second", "GB/s", 0),
    Column("share_of_copy", "of copy", 0, 100),
    Column("copy_gbytes_per_second", None, 0),
    Column("error", "error", 4),
]


class Settings:
    def __init__(self, given):
        self.pairs, self.tokens, self.query_tokens = [], [32768, 131072], 1
        self.batch, self.heads, self.kv_heads, self.dim = 1, 32, 8, 128
        self.rounds, self.device, self.json = 31, 0, False
        for name, value in given:
            if name in ("codec-k", "codec-v"):
                benchmarks.add_codec(self.pairs, name, value)
            elif name == "library":
                os.environ["KVANT_CUDA_LIBRARY"] = value
            else:
                cli.accept(self, FIELDS, name, value)
        self.pairs = benchmarks.codec_pairs(COMMAND.name, self.pairs, USUAL)
        if self.heads % self.kv_heads or self.heads // self.kv_heads > 64:
            cli.fail(
                f"--heads {self.heads} must be a multiple of --kv-heads {self.kv_heads}, "
                "at most 64 times as many",
                code=cli.USAGE,
            )


def find_library():
    try:
        library.invoke("GPU", "kvant_cuda_available")
    except kvant.Error as error:
        cli.fail(
            error.reason,
            "`make cuda` builds libkvant_cuda.so (it needs nvcc, no GPU); "
            "--library or KVANT_CUDA_LIBRARY names it if it is elsewhere",
            "kvant bench cuda needs a machine with an NVIDIA GPU; "
            "kvant bench attention measures the CPU",
        )


def measure_one(gpu, shape, pair, settings, bandwidth, step):
    """The result of one pair of codecs. There is one cache at a time, because two may not fit into
    the device's memory."""
    attention = Attention(gpu, shape, *pair)
    try:
        seconds = benchmarks.measure([attention], settings.rounds, step)[0]
    finally:
        attention.close()
    speed = attention.bytes / seconds
    measured = 1e6 * seconds, speed / 1e9, speed / bandwidth, bandwidth / 1e9, attention.error
    return [gpu.name, gpu.version, *pair, *shape, settings.rounds, attention.bytes, *measured]


def main(words):
    settings = Settings(COMMAND.parse(words))
    cli.catch_interrupt()
    find_library()
    gpu = Gpu(settings.device)
    bandwidth = gpu.copy_bandwidth(settings.rounds)
    print(f"{gpu.name}, a copy reads and writes {bandwidth / 1e12:.2f} TB/s", file=sys.stderr)
    model = settings.batch, settings.heads, settings.kv_heads, settings.dim
    shapes = [Shape(*model, n, settings.query_tokens) for n in settings.tokens]
    total = sum(map(work_of, shapes))
    progress = cli.Progress(total * len(settings.pairs) * (settings.rounds + 1), settings.json)
    rows = []
    code = cli.OK
    try:
        for shape in shapes:
            for pair in settings.pairs:
                rows.append(
                    measure_one(gpu, shape, pair, settings, bandwidth, benchmarks.stepper(progress))
                )
    except benchmarks.Stopped:
        code = cli.INTERRUPTED
    except kvant.Error as error:
        cli.complain(str(error))
        code = cli.RUNTIME
    finally:
        progress.end()
    if rows:
        benchmarks.show(COLUMNS, rows, settings.json)
    return code
