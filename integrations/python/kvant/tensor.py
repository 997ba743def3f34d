"""The keys or the values of one layer as compressed pages, addressed by slot (kvant/tensor.h). For
engines that manage blocks themselves, and for measuring the error of codecs in a cache."""

from __future__ import annotations

import ctypes as c
from typing import NamedTuple, Sequence

from . import arrays, checks
from . import structs as s
from .arrays import np
from .codec import Codec, ExactPart, tensor_params
from .library import PAGE_TOKENS, Owned, facts, invoke, library
from .places import Host
from .rope import Rope


class TensorInfo(NamedTuple):
    """`bytes`: of all memory. `sealed_bytes`, `open_bytes`: of one block. `n_transforms`: how many
    pairs of centre and scale are alive. `learned_bytes`: memory of the matrices of transform=first,
    which bytes does not count; `learned_most`: the same at full length. `working_bytes`: memory
    that learning takes in addition; `working_most`: the same at most."""

    role: str
    n_kv_heads: int
    head_dim: int
    n_blocks: int
    n_open_blocks: int
    n_transforms: int
    bytes: int
    sealed_bytes: int
    open_bytes: int
    written_blocks: int
    learned_bytes: int
    learned_most: int
    working_bytes: int
    working_most: int


class Block(NamedTuple):
    """One kv head of a block, copied. `state`: "empty", "open" or "sink" (fp16 rows) or "sealed"
    (codes). `written`: a bit per slot. `center`, `scale`: float32 [head_dim] with which the block
    was written, or None. `start`: the block's separate centre for a block at position 0, or None if
    blocks have no separate centres (Rope.block_centers)."""

    state: str
    transform_id: int
    written: int
    center: np.ndarray | None
    scale: np.ndarray | None
    start: np.ndarray | None


_STATES = ("empty", "open", "sink", "sealed")


class Tensor(Owned):
    """n_blocks blocks of 64 slots, each with a page per kv head. `codecs`: one Codec per kv head,
    of one role; the tensor keeps them alive.

    `blocks_per_sequence`: a fixed number of blocks for each sequence; 0: blocks belong to sequence
    0 in their order until assign says otherwise. `n_open_blocks`: fp16 blocks; 0: as many as the
    codecs need. `n_threads`: threads of a write; None: all that the process may use. Bytes do not
    depend on it. `memory`: the memory of pages, uint8 [bytes], aligned to 64 bytes and zeroed, or
    uint8 [n_blocks, bytes] with a row for each block, which may be longer than the block; None: the
    tensor allocates its memory. `exact`: the tokens that the tensor keeps as fp16 in addition to
    the codecs' (Scheme.exact); None: no tokens.

    While a thread writes, no other thread may read or write. Any number of threads may read at
    once."""

    def __init__(
        self,
        codecs: Sequence[Codec],
        n_sequences: int = 1,
        n_blocks: int = 1,
        blocks_per_sequence: int = 0,
        n_open_blocks: int = 0,
        n_threads: int | None = None,
        memory: np.ndarray | None = None,
        exact: ExactPart | None = None,
    ) -> None:
        super().__init__("kvant_tensor_free", tuple(codecs))
        given = None if memory is None else arrays.on_host(memory, "memory")
        in_rows = given is not None and given.ndim == 2
        stride = given.strides[0] if in_rows and given.shape[0] > 1 else 0
        made = tensor_params(
            self._keep, n_sequences, n_blocks, blocks_per_sequence, n_open_blocks, stride, exact
        )
        size = c.c_size_t()
        invoke("tensor", "kvant_tensor_size", made, c.byref(size))
        self._memory = arrays.zeroed(size.value) if given is None else given
        arrays.array(
            self._memory, "memory", np.uint8, (made.n_blocks, None) if in_rows else (None,)
        )
        least = size.value - (made.n_blocks - 1) * stride
        if self._memory.shape[-1] < least or self._memory.strides[-1] != 1:
            raise ValueError(
                f"memory: {least} contiguous bytes are needed, not {self._memory.shape[-1]}"
            )
        self._n_threads = checks.threads(n_threads)
        invoke("tensor", "kvant_tensor_create", made, self._memory.ctypes.data, self._handle)
        self.n_blocks, self._n_sequences = made.n_blocks, made.n_sequences
        self._row = (len(self._keep), self._keep[0].head_dim)

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return self._keep

    @property
    def info(self) -> TensorInfo:
        """Sizes and memory as they are now."""
        plain = facts("tensor info", "kvant_tensor_get_info", s.TensorInfo, self._handle)
        return TensorInfo(**plain | {"role": "kv"[plain["role"]]})

    def block(self, block: int, kv_head: int = 0) -> Block:
        """The state and the centres of a block, for inspection."""
        block = checks.count(block, "block", least=0, most=self.n_blocks - 1)
        head = checks.count(kv_head, "kv_head", least=0, most=self._row[0] - 1)
        found = s.BlockInfo.new()
        invoke("block", "kvant_tensor_get_block", self._handle, block, head, found)
        affine = (
            arrays.copied(x, "float32", self._row[1:])
            for x in (found.affine.center, found.affine.scale, found.start)
        )
        return Block(_STATES[found.state], found.transform_id, found.written, *affine)

    def assign(self, block: int, sequence: int, index: int) -> None:
        """Says that an empty block is the index-th of a sequence."""
        number = checks.count(block, "block", least=0, most=self.n_blocks - 1)
        sequence = checks.count(sequence, "sequence", least=0, most=self._n_sequences - 1)
        index = checks.count(index, "index", least=0)
        invoke("assign", "kvant_tensor_assign", self._handle, number, sequence, index)

    def write(self, slots: np.ndarray, rows: np.ndarray) -> None:
        """Writes rows, float32 [n, n_kv_heads, head_dim], to slots, int64 [n]: slot 64 * block +
        offset. If a slot repeats, its last row stays. Writes all rows or none. Error of status 50
        for a NaN or an infinity, 51 beyond fp16's range."""
        slots = arrays.contiguous(slots, "slots", np.int64, (None,))
        rows, stride = arrays.rows(rows, "rows", (slots.shape[0], *self._row))
        checks.in_range(slots, "slots", 0, PAGE_TOKENS * self.n_blocks)
        if slots.size:
            given = slots.ctypes.data, slots.size, rows.ctypes.data, stride
            invoke("write", "kvant_tensor_write", self._handle, *given, self._n_threads)

    def set_rope(self, rope: Rope | None) -> None:
        """Describes how RoPE rotates these keys. Learned transforms (transform=first) then also fit
        positions that have no keys yet."""
        given = None if rope is None else rope.struct()
        invoke("rope", "kvant_tensor_set_rope", self._handle, given)

    def note_queries(self, q: np.ndarray, positions: np.ndarray | None = None) -> None:
        """Queries float32 [n, heads, head_dim] of the tokens of the next write, which learns from
        them (transform=first). Heads that share a kv head follow each other. `positions`: int32
        [n], with a Rope; None: they follow the row written last."""
        q = Host().take(q, "q", "float32", (None, None, self._row[1]), rows=True)
        noted = s.Queries.new(q=q.address, token_stride=q.strides[0], head_stride=q.strides[1])
        noted.n_tokens, noted.n_heads = q.shape[:2]
        if positions is not None:
            positions = arrays.contiguous(positions, "positions", np.int32, (q.shape[0],))
            noted.positions = positions.ctypes.data
        invoke("queries", "kvant_tensor_note_queries", self._handle, noted, self._n_threads)

    def wants_queries(self, n: int = 1) -> bool:
        """Whether note_queries would use the queries of n tokens."""
        return bool(
            library().kvant_tensor_wants_queries(self._handle, checks.count(n, "n", least=0))
        )

    def make_codec(self, block: int, kv_head: int, like: Codec) -> Codec:
        """A codec like another one, with the centre, scale and matrix of a block, as if a
        calibration gave them: for pages outside of this tensor."""
        block = checks.count(block, "block", least=0, most=self.n_blocks - 1)
        head = checks.count(kv_head, "kv_head", least=0, most=self._row[0] - 1)
        made, given = c.c_void_p(), checks.handle(like, "like", "kvant_codec_free")
        invoke("codec", "kvant_tensor_make_codec", self._handle, block, head, given, made)
        return Codec.owning(made.value)

    def read(self, first: int, n: int) -> np.ndarray:
        """Reads n slots from `first` on: a new float32 array [n, n_kv_heads, head_dim]. A slot that
        was never written is zeros, or the centre if there is one."""
        slots = PAGE_TOKENS * self.n_blocks
        first = checks.count(first, "first", least=0, most=slots)
        n = checks.count(n, "n", least=0, most=slots - first)
        rows = np.empty((n, *self._row), np.float32)
        if n:
            to = rows.ctypes.data, rows[0].size
            invoke("read", "kvant_tensor_read", self._handle, first, n, *to)
        return rows

    def clear(self, first: int | None = None, n: int = 1) -> None:
        """Empties n blocks from `first` on. Without arguments it empties all blocks and forgets
        centres and scales."""
        if first is None:
            library().kvant_tensor_clear(self._handle)
            return
        first = checks.count(first, "first", least=0, most=self.n_blocks)
        n = checks.count(n, "n", least=0, most=self.n_blocks - first)
        invoke("clear", "kvant_tensor_clear_blocks", self._handle, first, n)

    def copy(self, first: int, to: Tensor, to_first: int, n: int = 1) -> None:
        """Copies n blocks without decoding them to a tensor of the same Codec objects, or within
        this one. Error of status 60 when the target has no room for their centres and scales or
        fp16 rows: use read and write then."""
        first = checks.count(first, "first", least=0, most=self.n_blocks)
        to_first = checks.count(to_first, "to_first", least=0, most=to.n_blocks)
        n = checks.count(n, "n", least=0, most=min(self.n_blocks - first, to.n_blocks - to_first))
        invoke("copy", "kvant_tensor_copy", self._handle, first, to.handle, to_first, n)

    def set_affine(self, center: np.ndarray | None = None, scale: np.ndarray | None = None) -> None:
        """Sets centre and scale, float32 [n_kv_heads, head_dim], before anything is written. They
        replace the centre and scale that center=first and norm=first take from the first rows."""
        kept = [
            arrays.channels(x, what, self._row)
            for x, what in ((center, "center"), (scale, "scale"))
        ]
        affine = s.Affine(*map(arrays.pointer, kept))
        invoke("centre and scale", "kvant_tensor_set_affine", self._handle, affine)

    def export_block(self, block: int) -> bytes:
        """A block as bytes, for import_block of a tensor with the same codecs, in another process
        too."""
        number = checks.count(block, "block", least=0, most=self.n_blocks - 1)
        most, used = library().kvant_tensor_export_size(self._handle), c.c_size_t()
        data = c.create_string_buffer(most)
        invoke("export", "kvant_tensor_export", self._handle, number, data, most, c.byref(used))
        return data.raw[: used.value]

    def import_block(self, block: int, data: bytes) -> None:
        """Replaces a block. Error of status 70 for damaged bytes and for bytes of other codecs.
        Error of status 60 when there is no room for the block's centre and scale or its fp16 rows.
        The block is then as before."""
        number = checks.count(block, "block", least=0, most=self.n_blocks - 1)
        invoke("import", "kvant_tensor_import", self._handle, number, bytes(data), len(data))
