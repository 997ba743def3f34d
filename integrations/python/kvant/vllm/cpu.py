"""The attention backend of vLLM's CPU build: its metadata and scheduling, kvant's pages and attention."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from ..library import PAGE_TOKENS
from . import chosen
from .pages import LayerPages, cell_bytes


# By the address of their memory, and the layer's number.
_in_use: weakref.WeakValueDictionary[tuple[int, int], LayerPages] = weakref.WeakValueDictionary()


class Impl(CPUAttentionBackendImpl):  # type: ignore[misc]
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        stored = chosen()
        assert stored is not None
        self.stored = stored
        self.pages: LayerPages | None = None
        if self.alibi_slopes is not None or self.attn_type != AttentionType.DECODER:
            raise NotImplementedError("kvant: vLLM's models with ALiBi and its encoders are not supported")

    def _pages(self, layer: Any, kv_cache: Tensor) -> LayerPages:
        """Of the memory that the layer has now: vLLM gives it another one after it measured how much there is. Layers
        that attend to another one's keys share its pages."""
        number = extract_layer_index(self.kv_sharing_target_layer_name or layer.layer_name)
        place = kv_cache.data_ptr(), number
        if self.pages is None or self.pages.memory.data_ptr() != place[0]:
            self.pages = _in_use.get(place)
        if self.pages is None:
            shape = self.num_kv_heads, self.head_size
            self.pages = _in_use[place] = LayerPages(self.stored, kv_cache, number, *shape)
        return self.pages

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        self._pages(layer, kv_cache).write(key[: len(slot_mapping)], value[: len(slot_mapping)], slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Tensor:
        if attn_metadata is None:  # a run that measures memory
            return output
        pages, starts = self._pages(layer, kv_cache), attn_metadata.query_start_loc.tolist()
        options: dict[str, Any] = dict(scale=self.scale, window=max(self.sliding_window, 0), causal=attn_metadata.causal)
        options |= dict(logit_softcap=self.logits_soft_cap or None)
        if self.sinks is not None:
            options["sinks"] = self.sinks.detach().to(torch.float32).numpy()
        rows = output.view(-1, self.num_heads, self.head_size)
        for i, n_tokens in enumerate(attn_metadata.seq_lens.tolist()):
            part = slice(starts[i], starts[i + 1])
            if part.start < part.stop:
                found = pages.attend(query[part], n_tokens, attn_metadata.block_table[i], **options)
                rows[part] = found.to(output.dtype)
        return output


class Backend(CPUAttentionBackend):  # type: ignore[misc]
    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The true size of a token and kv head, so that vLLM's scheduler counts the blocks that there are."""
        stored = chosen()
        assert stored is not None
        return replace(spec, state_content_bytes=cell_bytes(stored, spec.head_size))

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [PAGE_TOKENS]

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl
