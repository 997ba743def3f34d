"""The attention backend of vLLM on NVIDIA GPUs: kvant's pages, FlashAttention for prompts that nothing is cached of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheLayout

from ..library import MAX_HEAD_DIM, PAGE_TOKENS
from . import impl, is_ours
from .batch import Batch, Builder, Part
from .gpu_pages import LayerPages, workspace

logger = init_logger(__name__)


def _flash_attention(head_size: int) -> tuple[Any, dict[str, Any]] | None:
    """vLLM's, with its version; None where there is none for a GPU and head_dim."""
    try:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

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
            raise NotImplementedError("kvant: models with sinks or a softcap need codecs without a calibration of keys")
        if torch.cuda.is_available():
            logger.warning_once("kvant: this backend was tested without a GPU only, on a stand-in for one")
            device = torch.device("cuda", torch.cuda.current_device())
            workspace(self.head_size, device)  # before vLLM measures how much memory is left

    def attend_fresh(self, part: Part, q: Tensor, k: Tensor, v: Tensor, out: Tensor, batch: Batch) -> bool:
        if self.flash is None or not batch.causal or q.dtype == torch.float32:
            return False
        function, options = self.flash
        starts = batch.query_start_loc[part.first : part.last + 1]
        if self.sinks is not None:
            options = options | {"s_aux": self.sinks}
        function(
            q=q,
            k=k,
            v=v,
            out=out,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=part.most_queries,
            max_seqlen_k=part.most_queries,
            softmax_scale=self.scale,
            causal=True,
            window_size=[self.sliding_window - 1 if self.sliding_window else -1, 0 if self.sliding_window else -1],
            softcap=self.logits_soft_cap,
            **options,
        )
        return True


class Backend(AttentionBackend):  # type: ignore[misc]
    forward_includes_kv_cache_update = False
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    customize_spec = staticmethod(impl.customize_spec)

    @staticmethod
    def get_name() -> str:
        return "KVANT" if hasattr(AttentionBackendEnum, "KVANT") else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [PAGE_TOKENS]

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
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        return is_ours(kv_cache_dtype)

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
