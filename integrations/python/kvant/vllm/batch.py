"""Describes a step of vLLM for attention: parts of its batch, by the lengths that the host
knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator, NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from ..library import PAGE_TOKENS
from . import learn
from .exact import State


LONG = 128  # with this many queries or more, a sequence's past is unpacked to rows


class Part(NamedTuple):
    """Sequences first to last - 1 of a batch, whose queries are rows first_row to last_row - 1."""

    first: int
    last: int
    first_row: int
    last_row: int
    most_queries: int  #: the most queries of one sequence
    most_tokens: int  #: the most tokens of one sequence; 0: the host does not know
    fresh: bool  #: prompts from their first token on
    key_starts: Tensor | None = (
        None  #: 0 and the tokens of a sequence with many queries, on the device
    )

    @property
    def long(self) -> bool:
        return self.key_starts is not None


@dataclass
class Batch(AttentionMetadata):
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool
    parts: list[Part]
    exact: State | None = None  #: of exact blocks, which this step has planned


@dataclass(frozen=True)
class Options:
    scale: float
    window: int = 0  #: 0: none
    softcap: float = 0.0  #: 0: none
    sinks: Tensor | None = None
    causal: bool = True


def _prefills(
    starts: list[int], lengths: list[int], first: int, seq_lens: Tensor
) -> Iterator[Part]:
    """Runs of sequences that are all fresh, or all not. Each sequence with many queries is a
    separate part."""
    at, last = first, len(starts) - 1
    queries = [starts[i + 1] - starts[i] for i in range(last)]
    kinds = [
        "fresh" if n == length else "long" if LONG <= n < length else "short"
        for n, length in zip(queries, lengths)
    ]
    while at < last:
        kind = kinds[at]
        end = (
            at + 1
            if kind == "long"
            else next((i for i in range(at, last) if kinds[i] != kind), last)
        )
        key_starts = torch.nn.functional.pad(seq_lens[at:end], (1, 0)) if kind == "long" else None
        yield Part(
            at,
            end,
            starts[at],
            starts[end],
            max(queries[at:end]),
            max(lengths[at:end]),
            kind == "fresh",
            key_starts,
        )
        at = end


def _parts(common: Any, threshold: int) -> Iterator[Part]:
    n_decodes, n_prefills, n_rows, _ = split_decodes_and_prefills(
        common, decode_threshold=threshold
    )
    if n_decodes:
        yield Part(0, n_decodes, 0, n_rows, min(threshold, common.max_query_len), 0, False)
    if n_prefills:
        known = getattr(
            common, "seq_lens_cpu_upper_bound", None
        )  # exact for prompts, but not for prompts of draft models
        exact = known is not None and int(known[: common.num_reqs].max()) == common.max_seq_len
        lengths = (known if exact else common.seq_lens.cpu()).tolist()
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        yield from _prefills(starts, lengths, n_decodes, common.seq_lens)


class Builder(AttentionMetadataBuilder[Batch]):  # type: ignore[misc]
    """Decode steps, also of drafts, read only lengths on the device, so they may be CUDA graphs."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._exact: State | None = None

    def _state(self, common: Any) -> State | None:
        """The state of exact blocks, made when the memory of the cache is there. None if the layers
        have no exact blocks."""
        compilation = getattr(self.vllm_config, "compilation_config", None)
        layers = getattr(compilation, "static_forward_context", {})
        layer = layers.get(self.layer_names[0])
        pool, memory = getattr(getattr(layer, "impl", None), "pool", None), layer and layer.kv_cache
        if pool is None or not isinstance(memory, Tensor) or memory.numel() == 0:
            return None
        if self._exact is None or self._exact.n_blocks != len(memory):
            scheduler = self.vllm_config.scheduler_config
            most = max(scheduler.max_num_seqs, *(compilation.cudagraph_capture_sizes or (0,)))
            width = -(-self.vllm_config.model_config.max_model_len // PAGE_TOKENS)
            self._exact = State(
                pool.slots,
                len(memory),
                most,
                max(width, common.block_table_tensor.shape[1]),
                scheduler.max_num_batched_tokens + most,
                memory.device,
            )
        return self._exact

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int:
        return 1 << 16  # any

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Batch:
        learn.between_steps()
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise NotImplementedError(
                "kvant: causal attention for only some of the sequences is not supported; "
                "start without KVANT_VLLM and --attention-backend KVANT"
            )
        parts = list(_parts(common, self.reorder_batch_threshold or 1))
        n = common.num_reqs
        starts, lengths = common.query_start_loc[: n + 1], common.seq_lens[:n]
        table, slots, exact = common.block_table_tensor, common.slot_mapping, self._state(common)
        if exact is not None:
            exact.step(starts, lengths, table, slots)
        return Batch(starts, lengths, table, slots, common.causal, parts, exact)

    def update_block_table(self, metadata: Batch, blk_table: Tensor, slot_mapping: Tensor) -> Batch:
        return Batch(
            metadata.query_start_loc,
            metadata.seq_lens,
            blk_table,
            slot_mapping,
            metadata.causal,
            metadata.parts,
        )

    def update_draft_decode_metadata(self, metadata: Batch) -> None:
        """Nothing to do: everything that changes is on the device."""
