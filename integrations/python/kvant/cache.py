"""The compressed key-value cache of a model, whose sequences and blocks the library manages
(kvant/cache.h).

    cache = kvant.Cache(n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64, max_tokens=4096)
    sequence = cache.new_sequence()
    cache.append(layer, sequence, k, v)        # k, v: float32 [n, 3, 64]
    out = cache.attend(layer, sequence, q)     # q, out: float32 [n, 9, 64]"""

from __future__ import annotations

import ctypes as c
import os
import threading
from typing import Any, NamedTuple, Sequence, TypeVar

from . import checks
from . import structs as s
from .attend import problem
from .library import MAX_HEAD_DIM, Error, Owned, c_text, facts, invoke, library
from .places import Gpu, Host
from .rope import Rope
from .scheme import Scheme

_FULL = 60  # KVANT_ERR_FULL
_MEMORY = 40  # KVANT_ERR_MEMORY
_NONE = object()
Array = TypeVar("Array")  # NumPy's, or a GPU's with DLPack


class CacheInfo(NamedTuple):
    """`bytes`: memory of the blocks in use. `f16_bytes`: memory of the same tokens as fp16.
    `true_bits`: bits per number of a sealed block, every stored byte counted. `k`, `v`: specs of
    ordinary layers, None with a settings file. `working_bytes`: memory that learning takes now, in
    addition to bytes."""

    n_blocks: int
    n_free_blocks: int
    bytes: int
    f16_bytes: int
    true_bits: float
    calibrated: bool
    k: str | None
    v: str | None
    working_bytes: int


class Cache(Owned):
    """A cache of max_tokens tokens, shared by at most max_sequences sequences.

    Its codecs come from a Scheme, or from the arguments of one: preset, or specs k and v, or
    settings, and calibration. The default is the preset "balanced". `n_threads`: None for the
    CPUs that this process may use. `scale`: of attention, None for 1 / sqrt(head_dim).

    With device "cpu", arguments are NumPy arrays. Contiguous arrays are used without a copy.
    With device "cuda" (the current GPU) or "cuda:0", arguments are arrays on that GPU with
    DLPack or __cuda_array_interface__, such as PyTorch's tensors. They are never copied. Work
    runs on stream, a cudaStream_t as a number; the default is the legacy default stream, which
    is also PyTorch's default. With DLPack, kvant waits for work on other streams that makes the
    arguments. Calls return before the work is done: a caller who uses outputs or frees arguments
    on another stream orders that after this stream. `asynchronous`: append does not even wait
    for the check of its rows; the next call raises the Error of a row that was left out. Read
    include/kvant/cache.h for the codecs and options of GPUs. Error of status 30 when there is no
    GPU.

    `layers`: which layers of a model the cache's n_layers layers are, and how many the model
    has; None: all.

    Every size, shape and dtype is checked: TypeError and ValueError name the argument. Error has
    the library's words and its status: 50 a NaN or an infinity, 51 a number beyond fp16's range,
    60 no block left. After an Error of append or import_block the cache is as before.

    Calls of one cache wait for each other; different caches compute at once in different
    threads."""

    def __init__(
        self,
        n_layers: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        max_tokens: int,
        preset: str | None = None,
        device: str = "cpu",
        *,
        k: str | None = None,
        v: str | None = None,
        settings: str | os.PathLike[str] | None = None,
        calibration: str | os.PathLike[str] | None = None,
        scheme: Scheme | None = None,
        v_head_dim: int | None = None,
        max_sequences: int = 1,
        n_threads: int | None = None,
        scale: float | None = None,
        logit_softcap: float = 0.0,
        stream: int = 0,
        asynchronous: bool = False,
        layers: tuple[Sequence[int], int] | None = None,
    ) -> None:
        super().__init__("kvant_cache_free", scheme)
        self._lock = threading.Lock()
        self._sequences: set[int] = set()
        self.n_stepping = 0  #: sequences of begin_steps
        stream = checks.count(stream, "stream", least=0, most=2**64 - 1)
        self._place = Host() if checks.text(device, "device") == "cpu" else Gpu(stream)
        self.n_layers = checks.count(n_layers, "n_layers")
        self.n_heads = checks.count(n_heads, "n_heads")
        self.n_kv_heads = checks.count(n_kv_heads, "n_kv_heads")
        self.head_dim = checks.count(head_dim, "head_dim", most=MAX_HEAD_DIM)
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.v_head_dim = checks.count(v_head_dim, "v_head_dim", most=MAX_HEAD_DIM)
        self.device = device
        self.scale = self.head_dim**-0.5 if not scale else checks.number(scale, "scale")
        self.logit_softcap = checks.number(logit_softcap, "logit_softcap")
        texts = {
            "preset": preset,
            "k": k,
            "v": v,
            "settings": settings,
            "calibration": calibration,
            "device": device,
        }
        numbers = self._layer_numbers(layers)
        params = s.CacheParams.new(
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            max_tokens=checks.count(max_tokens, "max_tokens"),
            max_sequences=checks.count(max_sequences, "max_sequences"),
            n_threads=0 if n_threads is None else checks.threads(n_threads),
            scheme=checks.handle(scheme, "scheme", "kvant_scheme_free"),
            scale=self.scale,
            logit_softcap=self.logit_softcap,
            stream=stream or None,
            asynchronous=bool(asynchronous),
            layers=c.addressof(numbers) if numbers else None,
            n_model_layers=layers[1] if layers else 0,
            **{name: c_text(value, name) for name, value in texts.items()},
        )
        self._most_sequences = params.max_sequences
        invoke("cache", "kvant_cache_create", params, self._handle)

    def _layer_numbers(self, layers: tuple[Sequence[int], int] | None) -> Any:
        if layers is None:
            return None
        numbers = [checks.count(number, "layers", least=0) for number in layers[0]]
        if len(numbers) != self.n_layers:
            raise ValueError(
                f"layers: {len(numbers)} layers are given for n_layers={self.n_layers}"
            )
        return (c.c_uint32 * len(numbers))(*numbers)

    def close(self) -> None:
        """Frees the memory now instead of when the object goes. Every later call raises
        ValueError."""
        with self._lock:
            self._library.kvant_cache_free(c.byref(self._handle))

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _layer(self, layer: int) -> int:
        return checks.count(layer, "layer", least=0, most=self.n_layers - 1)

    def _open(self, sequence: Any = _NONE) -> Any:
        """Returns sequence after checking that it and the cache are open. The caller holds the
        lock."""
        if not self._handle:
            raise ValueError("the cache was closed: make a new one")
        if sequence is not _NONE and sequence not in self._sequences:
            raise ValueError(f"sequence: there is no sequence {sequence!r}")
        return sequence

    def _opened(self, sequence: int) -> int:
        if sequence < 0:
            status = _FULL if len(self._sequences) == self._most_sequences else _MEMORY
            raise Error("new sequence", status, library().kvant_error_message().decode())
        self._sequences.add(sequence)
        return sequence

    # Sequences

    def new_sequence(self) -> int:
        """Makes an empty sequence and returns its id. Error of status 60 when max_sequences are in
        use."""
        with self._lock:
            self._open()
            return self._opened(library().kvant_sequence_create(self._handle))

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens. Both share their blocks until one of them writes to
        a shared block. Error of status 60 as new_sequence, and of status 40 without memory."""
        with self._lock:
            return self._opened(library().kvant_sequence_fork(self._handle, self._open(sequence)))

    def free(self, sequence: int) -> None:
        """Forgets a sequence and the blocks that no other sequence shares. A new sequence may get
        its id."""
        with self._lock:
            library().kvant_sequence_free(self._handle, self._open(sequence))
            self._sequences.remove(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets all tokens from length on, in every layer."""
        length = checks.count(length, "length", least=0)
        with self._lock:
            number = self._open(sequence)
            invoke("truncate", "kvant_sequence_truncate", self._handle, number, length)

    def drop(self, sequence: int, n_tokens: int) -> None:
        """Forgets the whole blocks among the first n_tokens tokens, for models whose every layer
        has a sliding window. Their tokens count as masked; positions stay."""
        n_tokens = checks.count(n_tokens, "n_tokens", least=0)
        with self._lock:
            number = self._open(sequence)
            invoke("drop", "kvant_sequence_drop", self._handle, number, n_tokens)

    def length(self, sequence: int, layer: int = 0) -> int:
        """Tokens of a layer of a sequence."""
        layer = self._layer(layer)
        with self._lock:
            return library().kvant_sequence_length(self._handle, self._open(sequence), layer)

    # Rows and attention

    def append(self, layer: int, sequence: int, k: Any, v: Any) -> None:
        """Appends n tokens to a layer: k float32 [n, n_kv_heads, head_dim], v float32 [n,
        n_kv_heads, v_head_dim]. Each call is about one layer; in the end all layers must have the
        same tokens."""
        layer = self._layer(layer)
        k = self._place.take(k, "k", "float32", (None, self.n_kv_heads, self.head_dim))
        n = k.shape[0]
        v = self._place.take(v, "v", "float32", (n, self.n_kv_heads, self.v_head_dim))
        with self._lock:
            number = self._open(sequence)
            at = self._handle, layer, number
            if n:
                invoke("append", "kvant_cache_append", *at, k.address, v.address, n)

    def set_rope(self, layer: int, rope: Rope | None) -> None:
        """Describes how RoPE rotates a layer's keys. Learned transforms (transform=first) then also
        fit positions that have no keys yet. n_positions 0: max_tokens."""
        layer, given = self._layer(layer), None if rope is None else rope.struct()
        with self._lock:
            self._open()
            invoke("rope", "kvant_cache_set_rope", self._handle, layer, given)

    def note_queries(self, layer: int, q: Any, positions: Any = None) -> None:
        """The queries of the tokens that are appended next, float32 [n, n_heads, head_dim]. The
        presets learn from them and from the keys how to store keys (transform=first). Without calls
        of this function, the cache learns from the queries of attend instead, for the tokens after
        them. `positions`: int32 [n] on the CPU, with a Rope; None: they follow the token appended
        last."""
        layer = self._layer(layer)
        q = self._place.take(q, "q", "float32", (None, self.n_heads, self.head_dim), rows=True)
        noted = s.Queries.new(q=q.address, token_stride=q.strides[0], head_stride=q.strides[1])
        noted.n_tokens, noted.n_heads = q.shape[:2]
        if positions is not None:
            positions = Host().take(positions, "positions", "int32", (q.shape[0],))
            noted.positions = positions.address
        with self._lock:
            self._open()
            invoke("queries", "kvant_cache_note_queries", self._handle, layer, noted)

    def wants_queries(self, layer: int, n: int = 1) -> bool:
        """Whether note_queries would use the queries of n tokens. It never does without
        transform=first, nor for few tokens once the cache has learned enough."""
        layer, n = self._layer(layer), checks.count(n, "n", least=0)
        with self._lock:
            self._open()
            return bool(library().kvant_cache_wants_queries(self._handle, layer, n))

    def attend(
        self,
        layer: int,
        sequence: int,
        q: Array,
        *,
        out: Array | None = None,
        lse: Any = None,
        mask: Any = None,
        sinks: Any = None,
        causal: bool = True,
        window: int = 0,
        scale: float | None = None,
        logit_softcap: float | None = None,
        max_bias: float = 0.0,
        exact: bool = False,
    ) -> Array:
        """Attention of the sequence's n newest tokens, whose queries are q, float32 [n, n_heads,
        head_dim]. Returns out, float32 [n, n_heads, v_head_dim], which is made unless one is given.

        include/kvant/attention.h has the formula. `lse`: float32 [n, n_heads] to fill with
        log-sum-exps. `mask`: float16 [n, tokens of the sequence], added to scores; -inf hides.
        `sinks`: float32 [n_heads], logits of tokens whose value is 0. `causal`: no later token is
        seen, and n is at most the sequence's length. `window`: the number of tokens that a query
        token sees, itself included; 0: all. `max_bias`: ALiBi. `scale`, `logit_softcap`: None for
        the cache's. `exact`: without rounding queries and weights to 16-bit integers, several times
        slower; on the CPU.

        On a GPU the call returns before the outputs are there, and out must be given unless q is a
        PyTorch tensor."""
        options = dict(
            out=out, lse=lse, mask=mask, sinks=sinks, causal=causal, window=window, scale=scale
        )
        options |= dict(logit_softcap=logit_softcap, max_bias=max_bias, exact=exact)
        layer, dims = self._layer(layer), (self.head_dim, self.v_head_dim)
        with self._lock:
            number = self._open(sequence)
            n_tokens = library().kvant_sequence_length(self._handle, number, layer)
            made, out, kept = problem(self._place, q, self.n_heads, dims, n_tokens, **options)
            invoke("attend", "kvant_cache_attention", self._handle, layer, number, made)
        return out

    def append_batch(self, layer: int, sequences: Sequence[int], k: Any, v: Any) -> None:
        """append of n tokens to each of several sequences: k and v have a first dimension of
        len(sequences)."""
        layer, shape = self._layer(layer), (len(sequences), None, self.n_kv_heads)
        k = self._place.take(k, "k", "float32", (*shape, self.head_dim))
        n = k.shape[1]
        v = self._place.take(
            v, "v", "float32", (len(sequences), n, self.n_kv_heads, self.v_head_dim)
        )
        with self._lock:
            numbers = self._numbers(sequences)
            at = self._handle, layer, numbers, len(sequences)
            if n and numbers:
                invoke("append", "kvant_cache_append_batch", *at, k.address, v.address, n)

    def attend_batch(
        self, layer: int, sequences: Sequence[int], q: Array, *, out: Array | None = None
    ) -> Array:
        """Causal attention of the n newest tokens of each of several sequences: q float32
        [sequences, n, n_heads, head_dim]. On a GPU one call computes all sequences."""
        layer, heads = self._layer(layer), self.n_heads
        queries = self._place.take(q, "q", "float32", (len(sequences), None, heads, self.head_dim))
        shape = (*queries.shape[:2], heads, self.v_head_dim)
        out = self._place.new(q, shape) if out is None else out
        written = self._place.give(out, "out", "float32", shape)
        with self._lock:
            numbers = self._numbers(sequences)
            at, n = (self._handle, layer, numbers, len(sequences)), queries.shape[1]
            if n:
                rows = queries.address, written.address, n
                invoke("attend", "kvant_cache_attend_batch", *at, *rows)
        return out

    def _numbers(self, sequences: Sequence[int]) -> Any:
        return (c.c_int32 * len(sequences))(*(self._open(sequence) for sequence in sequences))

    def read(
        self, layer: int, sequence: int, first: int = 0, n: int | None = None
    ) -> tuple[Any, Any]:
        """The keys and values of n tokens from first on, all by default, as attention sees them:
        new float32 arrays [n, n_kv_heads, head_dim]. Zeros for dropped tokens. On the CPU; read_to
        is for GPUs."""
        from .arrays import np

        if self.device != "cpu":
            raise Error("read", 30, "pass arrays of the GPU to read_to")
        layer, first = self._layer(layer), checks.count(first, "first", least=0)
        with self._lock:
            number = self._open(sequence)
            length = library().kvant_sequence_length(self._handle, number, layer)
            n = checks.count(
                max(length - first, 0) if n is None else n,
                "n",
                least=0,
                most=max(length - first, 0),
            )
            k = np.empty((n, self.n_kv_heads, self.head_dim), np.float32)
            v = np.empty((n, self.n_kv_heads, self.v_head_dim), np.float32)
            at = self._handle, layer, number, first, n
            invoke("read", "kvant_cache_read", *at, k.ctypes.data, v.ctypes.data)
        return k, v

    def read_to(self, layer: int, sequence: int, first: int, k: Any, v: Any) -> None:
        """As read, into arrays on the device of the cache."""
        layer, first = self._layer(layer), checks.count(first, "first", least=0)
        n = k.shape[0]
        keys = self._place.give(k, "k", "float32", (n, self.n_kv_heads, self.head_dim))
        values = self._place.give(v, "v", "float32", (n, self.n_kv_heads, self.v_head_dim))
        with self._lock:
            number = self._open(sequence)
            at = self._handle, layer, number, first, n
            invoke("read", "kvant_cache_read", *at, keys.address, values.address)

    # Decode steps that a CUDA graph replays (kvant/cache.h)

    def begin_steps(self, sequences: Sequence[int]) -> tuple[int, int, bool]:
        """Returns how many steps can follow, a number that captured graphs depend on, and whether
        steps take only float32. Error of status 30 when steps are not possible: on the CPU, and
        before 64 tokens."""
        found = s.StepsInfo.new()
        with self._lock:
            numbers = self._numbers(sequences)
            invoke("steps", "kvant_steps_begin", self._handle, numbers, len(sequences), found)
            self.n_stepping = len(sequences)
        return found.n_steps, found.graph, found.floats

    def next_step(self) -> None:
        """Call it before each step: it makes the sequences of begin_steps one token longer. Error
        when no step is left."""
        with self._lock:
            self._open()
            invoke("steps", "kvant_steps_next", self._handle)

    def step(self, layer: int, arguments: s.Step) -> None:
        """Attention of one token per sequence of begin_steps in a layer, whose row joins the pages
        later. The call may be captured and replayed: nothing in it depends on the step."""
        layer = self._layer(layer)
        with self._lock:
            self._open()
            invoke("step", "kvant_cache_step", self._handle, layer, arguments)

    # Stores

    def export_blocks(self, sequence: int, first: int, n: int = 1) -> bytes:
        """n blocks of a sequence from block `first` on, of all layers, as bytes. Block i has tokens
        64 i to 64 i + 63. A cache with an equal scheme can import the bytes, in another process, on
        another machine or device. They hold the tokens of this sequence and no other row. They also
        hold the centres, scales and matrices that the cache learned from all of its sequences."""
        first = checks.count(first, "first", least=0)
        n = checks.count(n, "n", least=1)
        with self._lock:
            these, bytes_ = (self._handle, self._open(sequence), first, n), c.c_size_t()
            invoke("export", "kvant_sequence_export_size", *these, c.byref(bytes_))
            data = c.create_string_buffer(bytes_.value)
            invoke("export", "kvant_sequence_export", *these, data, bytes_.value)
        return data.raw

    def import_blocks(self, sequence: int, data: bytes | bytearray | memoryview) -> None:
        """Appends exported blocks to a sequence that ends with a whole block. Any bytes are safe to
        pass: Error of status 70 for damaged bytes, and for bytes of another scheme."""
        data = bytes(data)
        with self._lock:
            at = self._handle, self._open(sequence)
            invoke("import", "kvant_sequence_import", *at, data, len(data))

    # Facts about the cache

    @property
    def info(self) -> CacheInfo:
        """Blocks, memory and specs as they are now."""
        with self._lock:
            self._open()
            return CacheInfo(
                **facts("cache info", "kvant_cache_get_info", s.CacheInfo, self._handle)
            )

    @property
    def bytes(self) -> int:
        """Memory of learned matrices and of the blocks in use: codes, metadata and fp16 pages."""
        return self.info.bytes

    def __repr__(self) -> str:
        state = "" if self._handle else ", closed"
        return f"<kvant.Cache of {self.n_layers} layers on {self.device}{state}>"
