"""The codecs of a layer's kv heads on this rank, and how many bytes of vLLM's blocks they fill."""

from __future__ import annotations

import functools

from ..calibration import Calibration
from ..codec import Codec
from ..library import PAGE_TOKENS
from ..tensor import Tensor as Pages
from . import Stored


@functools.lru_cache(maxsize=1)
def _calibration(path: str | None) -> Calibration | None:
    return None if path is None else Calibration(path)


def codecs(stored: Stored, role: str, head_dim: int, layer: int = 0, heads: range = range(1)) -> list[Codec]:
    """heads: their numbers in the whole model."""
    calibration = _calibration(stored.calibration)
    return [Codec(getattr(stored, role), head_dim, role, calibration, layer, head) for head in heads]


def heads_of_rank(n_heads: int, total: int, rank: int, n_ranks: int) -> range:
    """The kv heads that a rank of tensor parallelism holds: its part, or a copy where ranks outnumber heads."""
    first = rank * total // n_ranks
    return range(first, first + n_heads)


def page_bytes(stored: Stored, role: str, head_dim: int) -> int:
    """ValueError for codecs whose rows are not in their pages alone."""
    codec = codecs(stored, role, head_dim)[0]
    if Pages([codec]).info.bytes != codec.page_bytes or codec.page_bytes % PAGE_TOKENS:
        spec = getattr(stored, role)
        raise ValueError(f"KVANT_VLLM: {spec} keeps rows beside its pages, which vLLM's blocks have no room for")
    return codec.page_bytes


def cell_bytes(stored: Stored, head_dim: int) -> int:
    """Bytes of a token and kv head, keys and values."""
    return sum(page_bytes(stored, role, head_dim) for role in "kv") // PAGE_TOKENS
