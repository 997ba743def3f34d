"""Features of vLLM that kvant's attention does not know. vLLM's CPU build asks no backend whether
it supports them, and ignored they would give wrong tokens. So kvant reads vLLM's configuration and
refuses to start. impl.py refuses single layers."""

from __future__ import annotations

import os
from typing import Any, Callable, NamedTuple

WITHOUT = "start without KVANT_VLLM and --attention-backend KVANT"
# vLLM's own measurements fill blocks with constants. All other connectors move blocks to places
# that read them as rows of 16-bit numbers, or that kvant was not tested with.
_CONNECTORS = (None, "DecodeBenchConnector")


class Limit(NamedTuple):
    setting: str  #: of vLLM's configuration, by its path
    is_wrong: Callable[[Any], bool]
    words: str  #: what is refused, and what to do


def _several(n: Any) -> bool:
    return isinstance(n, int) and n > 1


LIMITS = (
    Limit(
        "model_config.is_mm_prefix_lm",
        bool,
        "models whose image tokens see each other need --language-model-only with kvant",
    ),
    Limit(
        "model_config.rswa_window",
        lambda window: window is not None,
        f"models with rswa_window are not supported; {WITHOUT}",
    ),
    Limit(
        "parallel_config.decode_context_parallel_size",
        _several,
        "--decode-context-parallel-size has to be 1 with kvant",
    ),
    Limit(
        "parallel_config.prefill_context_parallel_size",
        _several,
        "--prefill-context-parallel-size has to be 1 with kvant",
    ),
    Limit(
        "parallel_config.enable_dbo", bool, "dual-batch overlap was not tested: unset --enable-dbo"
    ),
    Limit(
        "parallel_config.ubatch_size",
        _several,
        "batches in parts were not tested: unset --ubatch-size",
    ),
    Limit(
        "cache_config.kv_sharing_fast_prefill",
        bool,
        "--kv-sharing-fast-prefill was not tested: unset it",
    ),
    Limit(
        "kv_transfer_config.kv_connector",
        lambda name: name not in _CONNECTORS,
        "connectors that move blocks elsewhere (--kv-transfer-config) were not tested with kvant's "
        f"blocks; {WITHOUT}",
    ),
)


def _value(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


def check(config: Any) -> None:
    """NotImplementedError for the first feature in vLLM's configuration that kvant refuses."""
    for limit in LIMITS:
        if limit.is_wrong(_value(config, limit.setting)):
            raise NotImplementedError(f"kvant: {limit.words}")
    skipped = _value(config, "cache_config.kv_cache_dtype_skip_layers")
    if skipped and os.environ.get("KVANT_VLLM"):
        raise NotImplementedError(
            "kvant: --kv-cache-dtype-skip-layers leaves layers to vLLM, but KVANT_VLLM compresses "
            "all layers: unset one of them"
        )


def check_learning(config: Any) -> None:
    """NotImplementedError if a rank sees only a part of the model, so that its calibration lacks
    the rest."""
    for name in ("tensor", "pipeline"):
        if _several(_value(config, f"parallel_config.{name}_parallel_size")):
            raise NotImplementedError(
                f"kvant: KVANT_VLLM_LEARN needs the whole model on one GPU: set "
                f"--{name}-parallel-size 1"
            )
