"""The first and the newest blocks of sequences, exactly: a pool of fp16 rows next to vLLM's pages.

kvant's pages in vLLM hold codes only. The first tokens of a sequence and its newest tokens matter
most, so a pool holds some of their blocks in fp16. `kvant_cuda_exact_step` decides on the GPU which
blocks these are, and seals a block when its room is needed. Then the encoder takes whole blocks
instead of single rows, so decode steps do not wait for it.

Pool is a layer's memory, and State is what all layers of a step share. Codecs with a trellis search
have exact blocks. Other codecs encode single rows quickly, and exact blocks are larger than codes.
KVANT_VLLM_EXACT=0 switches exact blocks off, and KVANT_VLLM_EXACT=1 switches them on for all
codecs."""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import structs as s
from ..codec import Codec
from ..gpu import GpuCodec, call
from ..library import PAGE_TOKENS, Error
from .learn import LOG

SHARE = 0.03  #: of the memory of the cache
LEAST = 4  #: blocks of a kind, at least
_NEWEST_TOKENS = 128  # KVANT_EXACT_NEWEST
NEWEST = _NEWEST_TOKENS // PAGE_TOKENS  #: the block that is being filled, and the block before it
GROUP = 8  # KVANT_PLAN_RUN: blocks that are sealed at once, at most
MOST_STAGED = 256  #: tokens of a step whose rows pass through the pool
_UNSUPPORTED = 30  #: KVANT_ERR_UNSUPPORTED
# Methods of speculative decoding that have no layers: draft layers write rows between steps.
_WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")


class Slots(NamedTuple):
    first: int  #: blocks
    newest: int

    @property
    def all(self) -> int:
        """Blocks of the pool, with the room for staged rows."""
        return self.first + self.newest + -(-MOST_STAGED // PAGE_TOKENS)


def _memory(config: Any) -> int:
    """Bytes that the cache may have; the model's weights are not known yet."""
    given = getattr(config.cache_config, "kv_cache_memory_bytes", None)
    if given:
        return int(given)
    if not torch.cuda.is_available():
        return 1 << 30
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return int(total * config.cache_config.gpu_memory_utilization)


def is_wanted(*specs: str) -> bool:
    """Whether blocks of codecs of keys and of values are to be exact."""
    searches = any(spec.startswith("trellis") for spec in specs)
    return {"0": False, "1": True}.get(os.environ.get("KVANT_VLLM_EXACT", ""), searches)


def slots_of(config: Any, n_kv_heads: int, head_dim: int) -> Slots | None:
    """How many blocks a layer's pool has; None if its rows may come from layers that write between
    steps."""
    speculative = getattr(config, "speculative_config", None)
    if speculative is not None and speculative.method not in _WITHOUT_LAYERS:
        return None
    layers = config.model_config.get_num_layers(config.parallel_config)
    block = layers * n_kv_heads * PAGE_TOKENS * head_dim * 2 * 2  # keys and values
    sequences = config.scheduler_config.max_num_seqs
    n = int(SHARE * _memory(config)) // block
    first = max(LEAST, min(n // 3, sequences + GROUP))
    return Slots(first, max(LEAST, min(n - first, NEWEST * sequences + 2 * GROUP)))


def is_possible(codecs: list[Codec]) -> bool:
    """Whether rows of open pages can be sealed one by one with codecs of keys and of values, and
    are more exact than codes."""
    if any(codec.page_bytes >= 2 * PAGE_TOKENS * codec.head_dim for codec in codecs):
        return False
    made = [GpuCodec.of(codec) for codec in codecs]
    named = {role: s.CudaSealPages(codec=codec.handle) for role, codec in zip("kv", made)}
    arguments = s.CudaSealRowsArgs.new(most_rows=0, n_kv_heads=1, **named)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        call("seal_rows", arguments, device)
    except Error as error:
        if error.status != _UNSUPPORTED:
            raise
        return False
    return True


@functools.lru_cache
def say(slots: Slots, width: int) -> None:
    """Logs one line at the start. width: numbers of a layer's keys in a token."""
    size = slots.all * PAGE_TOKENS * width * 2 * 2 / 2**20
    LOG.info(
        "kvant: the first blocks of %d sequences and %d newest blocks, of 64 tokens each, stay in "
        "fp16: %.1f MiB per layer",
        slots.first,
        slots.newest,
        size,
    )


class Pool:
    """Exact blocks of a layer: rows of keys and of values, [blocks, kv heads, 64, head_dim]."""

    def __init__(self, slots: Slots, n_kv_heads: int, head_dim: int, device: torch.device) -> None:
        shape = 2, slots.all, n_kv_heads, PAGE_TOKENS, head_dim
        self.slots = slots
        self.rows = torch.zeros(shape, dtype=torch.float16, device=device)


class State:
    """Which blocks are exact: the same in all layers that have one builder of metadata. Arrays stay
    where they are, because captured graphs have their addresses."""

    def __init__(
        self,
        slots: Slots,
        n_blocks: int,
        most_sequences: int,
        table_width: int,
        most_tokens: int,
        device: torch.device,
    ) -> None:
        def array(*shape: int, value: int = -1, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        n, wide = slots.first + slots.newest, torch.int64
        self.slots, self.n_blocks, self.device = slots, n_blocks, device
        self.most_staged = MOST_STAGED
        self.owners, self.places = array(n), array(n_blocks)
        self.births, self.lives, self.clock = (array(k, value=0) for k in (n, n, 1))
        self.table = array(most_sequences, table_width, value=0)
        self.rows = array(most_tokens, dtype=wide)
        self.from_, self.to = (array(MOST_STAGED + PAGE_TOKENS * n, dtype=wide) for _ in range(2))
        self.n_sealed = array(1, value=0)
        self._arguments = s.CudaExactArgs.new(
            owners=self.owners.data_ptr(),
            births=self.births.data_ptr(),
            lives=self.lives.data_ptr(),
            places=self.places.data_ptr(),
            clock=self.clock.data_ptr(),
            n_first=slots.first,
            n_newest=slots.newest,
            n_blocks=n_blocks,
            newest=NEWEST,
            most_staged=self.most_staged,
            table=self.table.data_ptr(),
            to_stride=self.table.stride(0),
            rows=self.rows.data_ptr(),
            from_=self.from_.data_ptr(),
            to=self.to.data_ptr(),
            n_sealed=self.n_sealed.data_ptr(),
        )  # what all steps have alike

    def step(self, query_starts: Tensor, lengths: Tensor, table: Tensor, slots: Tensor) -> State:
        """Plans a step of some sequences: their query tokens' slots, and their lengths with these
        tokens. RuntimeError for more tokens or sequences than there is room for."""
        batch, n = len(lengths), len(slots)
        shape, room = (batch, table.shape[1], n), (*self.table.shape, len(self.rows))
        if any(own > most for own, most in zip(shape, room)):
            raise RuntimeError(
                f"kvant: a step of (sequences, blocks, tokens) {shape} is larger than {room}: set "
                "KVANT_VLLM_EXACT=0"
            )
        own = self._arguments
        own.lengths = lengths.data_ptr()
        own.query_starts = query_starts.data_ptr()
        own.block_table, own.slots = table.data_ptr(), slots.data_ptr()
        own.batch, own.n_tokens = batch, n
        own.table_stride, own.blocks_per_row = table.stride(0), table.shape[1]
        call("exact_step", own, self.device)
        return self

    def _places_of(self, blocks: Tensor) -> Tensor:
        """The slots of exact blocks, as they are between two steps; -1: the block is not exact."""
        places = self.places[blocks.clamp(0, self.n_blocks - 1).long()]
        owned = (places >= 0) & (self.owners[places.clamp(min=0).long()] == blocks)
        return torch.where(owned, places, -1)

    def rows_of(self, slots: Tensor) -> Tensor:
        """The pool's rows for slots of pages, as they are between two steps; -1: none."""
        places = self._places_of(slots.div(PAGE_TOKENS, rounding_mode="floor")).long()
        return torch.where(places >= 0, places * PAGE_TOKENS + slots % PAGE_TOKENS, -1)

    def entries_of(self, table: Tensor) -> Tensor:
        """A table with exact blocks in place of sealed ones, as they are between two steps."""
        places = self._places_of(table)
        return torch.where(places >= 0, -1 - places, table)

    def everything(self) -> tuple[Tensor, Tensor, Tensor]:
        """A list of the rows of all exact blocks, for sealing: from, to, and their number."""
        tokens = torch.arange(PAGE_TOKENS, device=self.device)
        owned = (self.owners >= 0).nonzero()
        from_, to = owned * PAGE_TOKENS + tokens, self.owners[owned].long() * PAGE_TOKENS + tokens
        n = torch.full((1,), to.numel(), dtype=torch.int32, device=self.device)
        return from_.flatten(), to.flatten(), n

    def forget(self) -> None:
        """No block is exact any more. Their pages must hold their rows."""
        self.owners.fill_(-1)
