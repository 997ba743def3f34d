"""vLLM with compressed blocks, without a fork: an entry point of the group vllm.general_plugins.

    KVANT_VLLM=turboquant4 vllm serve MODEL --block-size 64

KVANT_VLLM names what blocks are stored with: a name of STORED, or specs as K/V (int-8/turboquant-4). Without it nothing
is registered. vLLM's CPU build alone so far."""

from __future__ import annotations

import os
from typing import NamedTuple


class Stored(NamedTuple):
    k: str
    v: str


# Codecs whose pages hold all there is to know: engines share, drop and overwrite blocks as they like.
STORED = {
    "turboquant4": Stored("turboquant-4", "turboquant-4"),
    "int8": Stored("int-8", "int-8"),
    "int4": Stored("int-4", "int-4"),
    "trellis4": Stored("trellis-4", "trellis-4"),
    "trellis3": Stored("trellis-3", "trellis-3"),
}


def chosen() -> Stored | None:
    """What KVANT_VLLM says. ValueError for a name that is none."""
    name = os.environ.get("KVANT_VLLM", "")
    if not name:
        return None
    if "/" in name:
        return Stored(*name.split("/", 1))
    if name not in STORED:
        raise ValueError(f"KVANT_VLLM: {name!r} is none of {', '.join(STORED)}, and no pair of specs K/V")
    return STORED[name]


def register() -> None:
    """Called by vLLM in each of its processes, some of them more than once."""
    if chosen() is None:
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "kvant.vllm.cpu.Backend")
