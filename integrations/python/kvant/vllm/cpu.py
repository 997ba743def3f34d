"""The attention backend of vLLM's CPU build."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from ..library import PAGE_TOKENS
from . import impl
from .pages import LayerPages


class Impl(impl.Impl):
    Pages = LayerPages


class Backend(impl.Backend, CPUAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """vLLM must not split its blocks: its CPU build clears the wrong parts of split blocks in
        hybrid models."""
        return [MultipleOf(PAGE_TOKENS)]

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl
