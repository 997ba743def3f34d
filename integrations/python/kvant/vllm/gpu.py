"""The attention backend of vLLM on NVIDIA GPUs: kvant's pages, and FlashAttention over rows for
prompts and their long parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheLayout

from ..library import MAX_HEAD_DIM, PAGE_TOKENS
from . import codecs, exact, impl
from .batch import Batch, Part
from .gpu_pages import LayerPages, room_for_rows, workspace


def _flash_attention(head_size: int) -> tuple[Any, dict[str, Any]] | None:
    """vLLM's FlashAttention, with its version; None if there is none for this GPU and head_dim."""
    try:
        from vllm.v1.attention.backends.fa_utils import (
            flash_attn_varlen_func,
            get_flash_attn_version,
        )

        version = get_flash_attn_version()
    except (ImportError, AssertionError):
        return None
    known = version is not None and head_size % 8 == 0 and head_size <= 256
    return (flash_attn_varlen_func, {"fa_version": version}) if known else None


class Impl(impl.Impl):
    Pages = LayerPages

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.flash = _flash_attention(self.head_size)
        keys_have_center = "center" in self.stored.k or "transform" in self.stored.k
        if keys_have_center and (self.sinks is not None or self.logits_soft_cap):
            raise NotImplementedError(
                "kvant: models with sinks or a softcap need codecs without a calibration of keys, "
                "such as turboquant4"
            )
        if torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
            workspace(self.head_size, device)  # before vLLM measures how much memory is left
            room_for_rows(device)

    def _made_pool(self, layer: int) -> exact.Pool | None:
        stored = self.stored.of_layer(layer)
        made = [codecs.codecs(stored, role, self.head_size)[0] for role in "kv"]
        slots = exact.slots_of(self.config, self.num_kv_heads, self.head_size)
        wanted = exact.is_wanted(stored.k, stored.v)
        if slots is None or not wanted or not exact.is_possible(made):
            return None
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        exact.say(slots, self.num_kv_heads * self.head_size)
        return exact.Pool(slots, self.num_kv_heads, self.head_size, device)

    def attend_rows(
        self,
        pages: LayerPages,
        part: Part,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        batch: Batch,
    ) -> bool:
        if self.flash is None or not batch.causal or q.dtype == torch.float32:
            return False
        starts = batch.query_start_loc[part.first : part.last + 1]
        if part.fresh:
            self._flash(part, q, k, v, out, starts, starts, self.sinks)
            return True
        past, key_starts = part.most_tokens - part.most_queries, part.key_starts
        unseen = (
            max(0, past + 1 - self.sliding_window) // PAGE_TOKENS if self.sliding_window else 0
        )  # blocks, which vLLM may have dropped
        if not pages.fit_rows(part.most_tokens - unseen * PAGE_TOKENS, k.dtype):
            return False
        if unseen:
            key_starts = (key_starts - unseen * PAGE_TOKENS).clamp_(min=0)
        of_past = slice(unseen, -(-past // PAGE_TOKENS))
        blocks, table = batch.block_table[part.first, of_past], pages.table_of(batch)
        entries = None if table is batch.block_table else table[part.first, of_past]
        own, group = slice(part.first_row, part.last_row), self.num_heads // self.num_kv_heads
        n = past - unseen * PAGE_TOKENS
        for heads, keys, values in pages.rows(blocks, n, k[own], v[own], entries):
            of = slice(heads.start * group, heads.stop * group)
            sinks = None if self.sinks is None else self.sinks[of]
            self._flash(part, q[:, of], keys, values, out[:, of], starts, key_starts, sinks)
        return True

    def _flash(
        self,
        part: Part,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        starts: Tensor,
        key_starts: Tensor | None,
        sinks: Tensor | None,
    ) -> None:
        assert self.flash is not None
        function, options = self.flash
        if sinks is not None:
            options = options | {"s_aux": sinks}
        function(
            q=q,
            k=k,
            v=v,
            out=out,
            cu_seqlens_q=starts,
            cu_seqlens_k=key_starts,
            max_seqlen_q=part.most_queries,
            max_seqlen_k=part.most_tokens,
            softmax_scale=self.scale,
            causal=True,
            window_size=[
                self.sliding_window - 1 if self.sliding_window else -1,
                0 if self.sliding_window else -1,
            ],
            softcap=self.logits_soft_cap,
            **options,
        )


class Backend(impl.Backend, AttentionBackend):  # type: ignore[misc]
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "KVANT" if hasattr(AttentionBackendEnum, "KVANT") else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return PAGE_TOKENS

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 16 == 0 and head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER
