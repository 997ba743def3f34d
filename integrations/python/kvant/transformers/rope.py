"""The RoPE of a model's layers, from its config."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..rope import Rope

# Models in which RoPE rotates the first channels of every layer's keys, in halves. Other models may
# leave layers out, or pair other channels.
_MODELS = frozenset(
    "gemma gemma2 gemma3_text gpt_neox gpt_oss granite llama mistral mixtral olmo olmo2 phi phi3 "
    "qwen2 qwen2_moe qwen3 qwen3_moe "
    "stablelm starcoder2".split()
)
_DYNAMIC = "dynamic", "longrope"  # their frequencies depend on the length


def rope_of(config: Any, layer: int, head_dim: int, n_positions: int) -> Rope | None:
    """The RoPE of a layer, or None if the config does not tell it."""
    given, kind = getattr(config, "rope_parameters", None), None
    if config.model_type not in _MODELS or not isinstance(given, dict):
        return None
    if "rope_type" not in given:  # per type of layer
        kind = config.layer_types[layer]
        given = given.get(kind)
    if not given or given["rope_type"] in _DYNAMIC:
        return None
    if given["rope_type"] == "default":
        part = (
            given.get("partial_rotary_factor")
            or getattr(config, "partial_rotary_factor", None)
            or 1
        )
        n = int(head_dim * part)
        found = given["rope_theta"] ** -(
            torch.arange(0, n, 2, dtype=torch.float32, device="cpu") / n
        )
    else:
        found = ROPE_INIT_FUNCTIONS[given["rope_type"]](
            config, torch.device("cpu"), **({"layer_type": kind} if kind else {})
        )[0]
    return Rope(found.tolist(), n_positions=n_positions)
