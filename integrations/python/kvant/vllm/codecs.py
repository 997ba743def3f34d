"""The codecs of a layer's kv heads on this rank, and the bytes that they fill in vLLM's blocks."""

from __future__ import annotations

import functools
import math
from typing import Iterable

from ..arrays import np
from ..calibration import Calibration, Calibrator
from ..codec import Codec
from ..library import PAGE_TOKENS
from ..tensor import Tensor as Pages
from . import Stored


@functools.lru_cache(maxsize=1)
def _calibration(path: str | None) -> Calibration | None:
    return None if path is None else Calibration(path)


class _Learned:
    """The transforms that presets have learned in this process, on this rank."""

    calibration: Calibration | None = None


learned = _Learned()


@functools.lru_cache
def identity(head_dim: int) -> Calibration:
    """A calibration whose centers are 0 and whose transforms are multiples of the identity."""
    made, axes = Calibrator(model="identity"), np.eye(head_dim, dtype=np.float32)
    rows = np.concatenate([axes, -axes])
    for role in "kv":
        made.add_rows(0, role, rows[:, None])
    made.add_queries(0, 0, rows)
    return made.finish()


def calibration_of(stored: Stored) -> Calibration | None:
    return _calibration(stored.calibration)


def codecs(
    stored: Stored, role: str, head_dim: int, layer: int = 0, heads: range = range(1)
) -> list[Codec]:
    """The codecs of some kv heads; heads are their numbers in the whole model. A rank numbers its
    own heads in the transforms that it learned."""
    calibration, numbers = calibration_of(stored), list(heads)
    if stored.learns:
        calibration, numbers = learned.calibration, list(range(len(heads)))
        if calibration is None:
            calibration, layer, numbers = identity(head_dim), 0, [0] * len(heads)
    return [
        Codec(getattr(stored, role), head_dim, role, calibration, layer, head) for head in numbers
    ]


def heads_of_rank(n_heads: int, total: int, rank: int, n_ranks: int) -> range:
    """The kv heads of a rank of tensor parallelism: a part of them, or one copy if ranks outnumber
    heads."""
    first = rank * total // n_ranks
    return range(first, first + n_heads)


def page_bytes(stored: Stored, role: str, head_dim: int) -> int:
    """Bytes of a page. ValueError for codecs that keep rows outside of their pages."""
    codec = codecs(stored, role, head_dim)[0]
    if Pages([codec]).info.bytes != codec.page_bytes or codec.page_bytes % PAGE_TOKENS:
        spec = getattr(stored, role)
        raise ValueError(
            f"KVANT_VLLM: {spec} keeps rows outside of its pages, "
            "for which vLLM's blocks have no room"
        )
    return codec.page_bytes


CELL_ALIGN = 4  #: vLLM views blocks as numbers of the model's dtype, of up to 4 bytes


def cell_bytes(stored: Stored, head_dim: int) -> int:
    """Bytes of a token and kv head, keys and values."""
    bytes_ = sum(page_bytes(stored, role, head_dim) for role in "kv") // PAGE_TOKENS
    return -(-bytes_ // CELL_ALIGN) * CELL_ALIGN


def even_cells(stored: Stored, shapes: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Bytes of a token and kv head, for layers by their kv heads and head_dim. If layers have
    several sizes, vLLM makes blocks of equal bytes, which are mostly padding unless the sizes have
    whole ratios. So cells are padded until the largest token is a whole multiple of each smaller
    token."""
    cells = {shape: cell_bytes(stored, shape[1]) for shape in shapes}
    tokens = {shape: shape[0] * cell for shape, cell in cells.items()}
    if len(set(tokens.values())) < 2:
        return cells
    ratios = {shape: round(max(tokens.values()) / bytes_) for shape, bytes_ in tokens.items()}
    step = math.lcm(*(ratios[shape] * shape[0] * CELL_ALIGN for shape in cells))
    largest = -(-max(tokens[shape] * ratios[shape] for shape in cells) // step) * step
    return {shape: largest // (ratios[shape] * shape[0]) for shape in cells}
