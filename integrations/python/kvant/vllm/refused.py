"""Backends that vLLM's CPU build chooses by the model, past kvant. With KVANT_VLLM they refuse to
start, because nothing would be compressed."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend


class Mla(CPUMLABackend):  # type: ignore[misc]
    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError(
            "kvant: models with multi-head latent attention (MLA) are not supported; "
            "start without KVANT_VLLM"
        )
