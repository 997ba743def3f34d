"""kvant bench attention: the time of attention alone, compared with ggml's flash attention and the
machine's memory bandwidth, all measured in one run."""

import concurrent.futures
import ctypes
import math
import os
import sys
import time
from typing import NamedTuple

import numpy as np

import kvant
from kvant import attend, checks, library, places, system

from . import benchmarks, cli
from .attention_ggml import STOCK_TYPES, Ggml, GgmlSubject
from .table import Column

USUAL = ["int-4", "bdr-4", "turboquant-4", "octopus-4", "hqmq-s96r4"]
USUAL_STOCK = ["f16", "q8_0", "q4_0"]
COLD_BYTES = 32 << 20  # 16 times a level 2 cache of 2 MiB
MAX_LAYERS = 128
PREFILL_LAYERS = 2  # many queries spend little of their time on reading
PAGE = library.PAGE_TOKENS

COMMAND = cli.Command(
    name="bench attention",
    usage="[-k SPEC [-v SPEC]]... [--stock TYPE]... [-d DIMS] [-g GROUPS] [-n TOKENS] [-q QUERIES]",
    about="""\
Measures attention alone: one query token (decode) and many (prefill, causal) on long
caches, for codecs and for ggml's flash attention, and the bandwidth of memory. Needs NumPy.""",
    options=cli.options(
        benchmarks.CODEC_OPTIONS
        + """\
      --stock TYPE        ggml's flash attention on f16, q8_0, q4_0, ..., may be repeated
                          (default: these three). f16 is always there; none leaves all out
      --levels A,B        CPU levels of kvant (default: the one in use); ggml chooses its own
  -d, --head-dim N,N      numbers of a row (default 128)
  -g, --gqa N,N           query heads of a kv head (default 4)
  -n, --tokens N,N        tokens in the cache (default 4096,32768)
  -q, --queries N,N       query tokens, the last ones of the cache (default 1,512). More than 8
                          are measured on the shortest cache only, but with --tokens given
      --kv-heads N        kv heads (default 2)
  -t, --threads N         threads (default: CPUs this process may use)
  -r, --rounds N          rounds, of which the median is given (default 5)
      --runtime DIR       folder of llama.cpp's libraries, which ggml is one of
      --json              one JSON array of flat objects
"""
    ),
    notes="""\
Each line is the time of one layer. Decode goes around enough layers to exceed the level 2
caches 16 times; a level 3 cache may still hold them. GB/s are bytes of keys and values as they
are stored; 'of memory' is their share of the speed of plain reading, over a buffer of four
level 3 caches, or of 2 GiB if that is less. 'x f16' says how many times faster than ggml's f16
it is. Rows are normally distributed. Ctrl-C prints all complete results.

example:
  kvant bench attention -k trellis-4 -k int-4 -n 32768 -q 1 --levels avx2,avx512vnni""",
)
FIELDS = {
    "head-dim": ("dims", benchmarks.numbers, 1, library.MAX_HEAD_DIM),
    "gqa": ("groups", benchmarks.numbers, 1, 64),
    "tokens": ("tokens", benchmarks.numbers, 64, 1 << 22),
    "queries": ("queries", benchmarks.numbers, 1, 4096),
    "kv-heads": ("kv_heads", cli.whole, 1, 128),
    "threads": ("threads", cli.whole, 1, 512),
    "rounds": ("rounds", cli.whole, 1, 101),
    "runtime": ("runtime",),
    "json": ("json",),
}


class Shape(NamedTuple):
    head_dim: int
    group: int  # query heads of a kv head
    n_kv_heads: int
    n_tokens: int
    n_queries: int
    n_threads: int

    @property
    def n_heads(self):
        return self.group * self.n_kv_heads

    def layers(self, n_bytes):
        """The number of layers that a run goes around, for caches of n_bytes bytes. As in a model,
        a layer's cache is evicted before the layer is computed again."""
        if self.n_queries > 8:
            return PREFILL_LAYERS
        return min(max(math.ceil(COLD_BYTES / n_bytes), 2), MAX_LAYERS)


class Inputs:
    """The inputs of all subjects of a shape. `mask`: causal, the queries are the last tokens."""

    def __init__(self, shape):
        self.shape = shape
        self.n_rows = min(-(-shape.n_tokens // PAGE) * PAGE, benchmarks.DISTINCT_ROWS)
        self.k = benchmarks.normal(1, self.n_rows, shape.n_kv_heads, shape.head_dim)
        self.v = benchmarks.normal(2, self.n_rows, shape.n_kv_heads, shape.head_dim)
        self.q = benchmarks.normal(3, shape.n_queries, shape.n_heads, shape.head_dim)
        last = np.arange(shape.n_tokens - shape.n_queries, shape.n_tokens)
        self.mask = np.where(
            np.arange(shape.n_tokens) > last[:, None], np.float16(-np.inf), np.float16(0)
        )


class KvantSubject:
    """A kvant.Cache. Each layer that a run goes around is a sequence with separate memory.

    Runs call the library directly, with arguments made before, because Python's checks of them
    would be measured, too."""

    def __init__(self, inputs, k, v, level):
        shape = inputs.shape
        self.library, self.k, self.v, self.level = "kvant", k, v, level
        stored = sum(
            kvant.Codec(spec, shape.head_dim, role).page_bytes
            for spec, role in ((k, "k"), (v, "v"))
        )
        self.n_layers = shape.layers(stored * shape.n_kv_heads * shape.n_tokens / PAGE)
        self.cache = kvant.Cache(
            1,
            shape.n_heads,
            shape.n_kv_heads,
            shape.head_dim,
            self.n_layers * shape.n_tokens,
            k=k,
            v=v,
            max_sequences=self.n_layers,
            n_threads=shape.n_threads,
        )
        for _ in range(self.n_layers):
            self._fill(inputs, self.cache.new_sequence())
        self.bytes = self.cache.bytes // self.n_layers
        problem, self.out, self._keep = attend.problem(
            places.Host(),
            inputs.q,
            shape.n_heads,
            (shape.head_dim,) * 2,
            shape.n_tokens,
            mask=inputs.mask,
            causal=False,
        )
        self._arguments = [
            (self.cache.handle, 0, layer, ctypes.byref(problem)) for layer in range(self.n_layers)
        ]

    def _fill(self, inputs, sequence):
        """Encodes the distinct blocks once and copies them, because encoding a long cache would
        take longer than measuring it. The repeated blocks are from the middle of a sequence: blocks
        at both ends may hold rows that are not compressed."""
        n_blocks, rest = divmod(inputs.shape.n_tokens, PAGE)
        n_distinct = min(n_blocks, inputs.n_rows // PAGE)
        first = 0
        if sequence == 0:
            first = n_distinct
            self.cache.append(0, 0, inputs.k[: first * PAGE], inputs.v[: first * PAGE])
        for block in range(first, n_blocks):
            source = block if block < n_distinct else n_distinct // 4 + block % (n_distinct // 2)
            self.cache.import_blocks(sequence, self.cache.export_blocks(0, source))
        self.cache.append(0, sequence, inputs.k[:rest], inputs.v[:rest])

    def run(self):
        attention, status = library.library().kvant_cache_attention, 0
        library.set_cpu_level(self.level)
        start = time.perf_counter()
        for arguments in self._arguments:
            status = status or attention(*arguments)
        seconds = (time.perf_counter() - start) / self.n_layers
        library.check(self.k, status)
        return seconds

    def check(self):
        check_finite(self, self.out)

    def close(self):
        self.cache.close()


def check_finite(subject, out):
    if not np.isfinite(out).all():
        cli.fail(f"{subject.library} {subject.k}: its output is not finite")


# ---- the machine ----


def read_bandwidth(n_threads):
    """Bytes per second that n_threads threads read from a buffer, each a separate part, in the
    fastest of five passes; and the buffer's bytes. A search for a byte that is not there does
    little except reading."""
    size = (
        min(max(256 << 20, 4 * system.last_cache()), 2 << 30)
        // n_threads
        // 4096
        * 4096
        * n_threads
    )
    buffer = np.ones(size, np.uint8)  # pages that were never written are all one page of zeros
    memchr = ctypes.CDLL(None).memchr
    memchr.restype = ctypes.c_void_p
    memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    part = size // n_threads

    def read(thread):
        return memchr(buffer.ctypes.data + thread * part, 2, part)

    best = math.inf
    with concurrent.futures.ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(read, range(n_threads)))  # starts the threads
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(read, range(n_threads)))
            best = min(best, time.perf_counter() - start)
    return size / best, size


# ---- the command ----


class Settings:
    def __init__(self, given):
        self.pairs, self.stock, self.levels = [], [], []
        self.dims, self.groups, self.tokens, self.queries = [128], [4], [4096, 32768], [1, 512]
        self.kv_heads, self.rounds, self.threads = 2, 5, checks.threads(None)
        self.runtime = os.environ.get("KVANT_RUNTIME")
        self.json = False
        self.given = {name for name, _ in given}
        for name, value in given:
            self._take(name, value)
        self._check()
        self.pairs = benchmarks.codec_pairs(COMMAND.name, self.pairs, USUAL)
        if "stock" not in self.given:
            self.stock = USUAL_STOCK
        self.levels = self.levels or [library.cpu_level()]

    def _take(self, name, value):
        if name in ("codec-k", "codec-v"):
            benchmarks.add_codec(self.pairs, name, value)
        elif name == "stock":
            self.stock += [value] if value == "none" or "f16" in self.stock else ["f16", value]
        elif name == "levels":
            self.levels = [self._level(word) for word in value.split(",")]
        else:
            cli.accept(self, FIELDS, name, value)

    @staticmethod
    def _level(word):
        try:
            library.set_cpu_level(word)
        except ValueError:
            cli.fail(f"--levels: '{word}' is not a CPU level: c, avx2, avx512, ...", code=cli.USAGE)
        except kvant.Error:
            cli.fail(
                f"--levels: this machine has no {word}; kvant --version names its best level",
                code=cli.USAGE,
            )
        return library.cpu_level()  # auto has a name, too

    def _check(self):
        if "none" in self.stock and len(self.stock) > 1:
            cli.fail(
                f"--stock none and --stock {next(t for t in self.stock if t != 'none')} exclude "
                "each other: leave one of them out",
                code=cli.USAGE,
            )
        self.stock = list(dict.fromkeys(t for t in self.stock if t != "none"))  # f16 f16 is f16
        for name in self.stock:
            if name not in STOCK_TYPES:
                cli.fail(
                    f"--stock: llama.cpp has no cache type '{name}'",
                    ", ".join(STOCK_TYPES),
                    code=cli.USAGE,
                )
        if "queries" in self.given and max(self.queries) > min(self.tokens):
            cli.fail(
                f"--queries {max(self.queries)} are more than --tokens {min(self.tokens)}",
                "queries are the last tokens of the cache",
                code=cli.USAGE,
            )

    def shapes(self):
        for dim in self.dims:
            for group in self.groups:
                for n_queries in self.queries:
                    for i, n_tokens in enumerate(self.tokens):
                        asked = n_queries <= 8 or "tokens" in self.given or i == 0
                        if asked and n_queries <= n_tokens:
                            yield Shape(
                                dim, group, self.kv_heads, n_tokens, n_queries, self.threads
                            )


COLUMNS = [
    Column("library", "library"),
    Column("k", "K"),
    Column("v", "V"),
    Column("level", "level"),
    Column("head_dim", "head_dim", 0),
    Column("gqa", "gqa", 0),
    Column("kv_heads", None, 0),
    Column("tokens", "tokens", 0),
    Column("queries", "queries", 0),
    Column("threads", None, 0),
    Column("layers", None, 0),
    Column("bytes", None, 0),
    Column("microseconds", "us", 0),
    Column("gbytes_per_second", "GB/s", 2),
    Column("times_f16", "x f16", 2),
    Column("share_of_bandwidth", "of memory", 0, 100),
    Column("read_gbytes_per_second", None, 0),
]


def measure_shape(shape, settings, ggml, bandwidth, step):
    """The results of one shape. The first subject is ggml's f16 if it is measured."""
    inputs, subjects = Inputs(shape), []
    try:
        for make, arguments in [(GgmlSubject, (ggml, name)) for name in settings.stock] + [
            (KvantSubject, (*pair, level)) for pair in settings.pairs for level in settings.levels
        ]:
            subject = make(inputs, *arguments)
            subject.work = benchmarks.work_of(
                shape.n_queries, shape.n_tokens, shape.n_heads, shape.head_dim
            )
            subject.label = (
                f"{subject.library} {subject.k}, head_dim {shape.head_dim}, {shape.n_tokens} tokens"
            )
            subjects.append(subject)
        medians = benchmarks.measure(subjects, settings.rounds, step)
    finally:
        for subject in subjects:
            subject.close()
    f16 = medians[0] if settings.stock else math.nan
    rows = []
    for s, seconds in zip(subjects, medians):
        speed = s.bytes / seconds
        measured = 1e6 * seconds, speed / 1e9, f16 / seconds, speed / bandwidth, bandwidth / 1e9
        rows.append([s.library, s.k, s.v, s.level, *shape, s.n_layers, s.bytes, *measured])
    return rows


def main(words):
    settings = Settings(COMMAND.parse(words))
    cli.catch_interrupt()
    ggml = Ggml(settings.runtime, settings.threads) if settings.stock else None
    bandwidth, size = read_bandwidth(settings.threads)
    print(
        f"{settings.threads} threads read {size >> 20} MiB at {bandwidth / 1e9:.1f} GB/s; "
        f"the last cache has {system.last_cache() >> 20} MiB",
        file=sys.stderr,
    )
    n_subjects = len(settings.stock) + len(settings.pairs) * len(settings.levels)
    total = sum(
        benchmarks.work_of(s.n_queries, s.n_tokens, s.n_heads, s.head_dim)
        for s in settings.shapes()
    )
    progress, rows = cli.Progress(total * n_subjects * (settings.rounds + 1), settings.json), []
    code = cli.OK
    try:
        for shape in settings.shapes():
            rows += measure_shape(shape, settings, ggml, bandwidth, benchmarks.stepper(progress))
    except benchmarks.Stopped:
        code = cli.INTERRUPTED
    except kvant.Error as error:
        cli.fail(
            str(error),
            "kvant codecs lists all codecs; codecs that need a calibration cannot be measured here",
        )
    finally:
        progress.end()
    benchmarks.show(COLUMNS, rows, settings.json)
    return code
