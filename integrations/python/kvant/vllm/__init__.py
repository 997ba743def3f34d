"""vLLM with compressed blocks, without a fork: an entry point of the group vllm.general_plugins.

    KVANT_VLLM=turboquant4 vllm serve MODEL --block-size 64

KVANT_VLLM names what blocks are stored with: a name of STORED, a preset, or specs as K/V (int-8/turboquant-4). Presets
need KVANT_VLLM_CALIBRATION, the path of a .kvcal. Without KVANT_VLLM nothing is registered. vLLM's CPU build alone so
far."""

from __future__ import annotations

import os
from typing import NamedTuple


class Stored(NamedTuple):
    k: str
    v: str
    calibration: str | None = None  #: a path


# Codecs whose pages hold all there is to know: engines share, drop and overwrite blocks as they like.
STORED = {
    "turboquant4": Stored("turboquant-4", "turboquant-4"),
    "int8": Stored("int-8", "int-8"),
    "int4": Stored("int-4", "int-4"),
    "trellis4": Stored("trellis-4", "trellis-4"),
    "trellis3": Stored("trellis-3", "trellis-3"),
}


PRESETS = ("quality", "balanced", "small")


def _preset(name: str) -> Stored:
    """Without the first tokens in fp16, for which blocks have no room."""
    from ..settings import preset

    found = preset(name, calibrated=True)
    return Stored(*(f"{spec},sink=0" if ":" in spec else spec for spec in (found.k, found.v)))


def chosen() -> Stored | None:
    """What KVANT_VLLM says. ValueError for a name that is none."""
    name, calibration = os.environ.get("KVANT_VLLM", ""), os.environ.get("KVANT_VLLM_CALIBRATION") or None
    if not name:
        return None
    if name in PRESETS and not calibration:
        raise ValueError(f"KVANT_VLLM: {name} needs KVANT_VLLM_CALIBRATION, the path of a file that kvant.calibrate made")
    if name not in (*STORED, *PRESETS) and "/" not in name:
        raise ValueError(f"KVANT_VLLM: {name!r} is none of {', '.join((*STORED, *PRESETS))}, and no pair of specs K/V")
    found = _preset(name) if name in PRESETS else STORED.get(name) or Stored(*name.split("/", 1))
    return found._replace(calibration=calibration)


def register() -> None:
    """Called by vLLM in each of its processes, some of them more than once."""
    if chosen() is None:
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "kvant.vllm.cpu.Backend")
