"""The attention backend of vLLM's CPU build."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from ..library import PAGE_TOKENS
from . import impl, is_ours
from .batch import Builder
from .pages import LayerPages


class Impl(impl.Impl):
    Pages = LayerPages


class Backend(CPUAttentionBackend):  # type: ignore[misc]
    customize_spec = staticmethod(impl.customize_spec)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        return is_ours(kv_cache_dtype)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [PAGE_TOKENS]

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder
