"""Attention of a layer over kvant's pages, on CPUs and GPUs."""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from ..library import PAGE_TOKENS
from . import Stored, chosen, is_ours
from .batch import Batch, Builder, Options, Part
from .codecs import cell_bytes, heads_of_rank
from .learn import Learner

# Pages by their memory, and the layer's number.
_in_use: weakref.WeakValueDictionary[tuple[Any, int], Any] = weakref.WeakValueDictionary()
# Of the model whose layers are made, if KVANT_VLLM_LEARN asks for it.
_learner: list[Learner] = []
# What the layers made last are stored with: vLLM asks a backend for the size of blocks without naming the dtype.
_stored: list[Stored] = []


def customize_spec(spec: Any) -> Any:
    """The true size of a token and kv head, so that vLLM's scheduler counts the blocks that there are."""
    stored = _stored[-1] if _stored else chosen()
    assert stored is not None
    return replace(spec, state_content_bytes=cell_bytes(stored, spec.head_size))


def _learning(model: str, n_ranks: int) -> Learner | None:
    path = os.environ.get("KVANT_VLLM_LEARN")
    if path and n_ranks > 1:
        raise NotImplementedError("kvant: KVANT_VLLM_LEARN needs all kv heads on one GPU")
    if path and not _learner:
        _learner.append(Learner(path, model, int(os.environ.get("KVANT_VLLM_LEARN_POSITIONS") or 0)))
    return _learner[0] if path else None


class Backend:
    """What the backends of CPUs and GPUs say alike."""

    customize_spec = staticmethod(customize_spec)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        return is_ours(kv_cache_dtype)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [PAGE_TOKENS]

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


class Impl(AttentionImpl):  # type: ignore[misc]
    Pages: Any  #: of a layer: write and attend

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        if alibi_slopes is not None or attn_type != AttentionType.DECODER:
            raise NotImplementedError("kvant: vLLM's models with ALiBi and its encoders are not supported")
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads or num_heads
        self.scale, self.kv_cache_dtype, self.sinks = float(scale), kv_cache_dtype, sinks
        self.sliding_window, self.logits_soft_cap = sliding_window or 0, logits_soft_cap or 0.0
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        model = get_current_vllm_config().model_config
        stored = chosen(kv_cache_dtype, model.model)
        assert stored is not None
        self.stored = stored
        _stored[:] = [stored]
        ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self.learner = _learning(model.model, ranks[1])
        self.heads = heads_of_rank(self.num_kv_heads, model.get_total_num_kv_heads(), *ranks)
        self.pages, self.place = None, None

    def _pages(self, layer: Any, kv_cache: Tensor) -> Any:
        """Of the memory that the layer has now: vLLM gives it another one after it measured how much there is. Layers
        that attend to another one's keys share its pages."""
        place = kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride()
        if self.place != place:
            name = self.kv_sharing_target_layer_name or layer.layer_name
            if self.stored.calibration and (getattr(layer, "is_draft_layer", False) or name.startswith("draft_model.")):
                raise NotImplementedError("kvant: a calibration is of one model; with draft models take codecs without one")
            number = extract_layer_index(name)
            self.pages, self.place = _in_use.get((place, number)), place
            if self.pages is None:
                self.pages = _in_use[place, number] = self.Pages(self.stored, kv_cache, number, self.heads, self.head_size)
        return self.pages

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        n = len(slot_mapping)
        self._pages(layer, kv_cache).write(key[:n], value[:n], slot_mapping)

    def _options(self, batch: Batch) -> Options:
        return Options(self.scale, self.sliding_window, self.logits_soft_cap, self.sinks, batch.causal)

    def _learn(self, layer: Any, part: Part, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> None:
        """From whole prompts."""
        assert self.learner is not None
        if getattr(layer, "is_draft_layer", False) or layer.layer_name.startswith("draft_model."):
            return
        starts = batch.query_start_loc[part.first : part.last + 1].tolist()
        for own in map(slice, starts, starts[1:]):
            options = self.scale, self.sliding_window, self.logits_soft_cap
            self.learner.see(extract_layer_index(layer.layer_name), q[own], k[own], v[own], *options)

    def attend_rows(self, pages: Any, part: Part, q: Tensor, k: Tensor, v: Tensor, out: Tensor, batch: Batch) -> bool:
        """Attention over rows, of whole prompts and of long parts of one; False: there is none, pages will do."""
        return False

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Batch | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # a run that measures memory
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("kvant: outputs are not quantised")
        pages, batch = self._pages(layer, kv_cache), attn_metadata
        out = output.view(-1, self.num_heads, self.head_size)
        for part in batch.parts:
            if self.learner is not None and not self.learner.done and part.fresh and key is not None:
                self._learn(layer, part, query, key, value, batch)
            rows = (part.fresh or part.long) and key is not None
            if not (rows and self.attend_rows(pages, part, query, key, value, out, batch)):
                pages.attend(query, out, batch, part, self._options(batch))
        return output

