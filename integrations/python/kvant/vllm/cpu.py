"""The attention backend of vLLM's CPU build."""

from __future__ import annotations

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from . import impl
from .pages import LayerPages


class Impl(impl.Impl):
    Pages = LayerPages


class Backend(impl.Backend, CPUAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl
