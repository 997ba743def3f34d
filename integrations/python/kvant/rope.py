"""How RoPE rotates keys by their positions (kvant_rope of kvant/tensor.h)."""

from __future__ import annotations

from typing import NamedTuple, Sequence

from . import arrays, checks
from . import structs as s
from .arrays import np


class Rope(NamedTuple):
    """RoPE of the first 2 * len(frequencies) channels of keys and queries, frequencies in radians
    per position. `interleaved`: pairs are channels 2i and 2i + 1, otherwise i and i +
    len(frequencies). `n_positions`: positions that a sequence may have; 0: all that fit.
    `n_position_transforms`: position buckets, each with its own matrix; 0: as many as reduce the
    error. `block_centers`: each block whose positions are known has a separate centre, the mean of
    keys at these positions; not on a GPU."""

    frequencies: Sequence[float]
    interleaved: bool = False
    n_positions: int = 0
    n_position_transforms: int = 0
    block_centers: bool = False

    def struct(self) -> s.Rope:
        """The struct for the library. It keeps the array that it points to."""
        kept = arrays.contiguous(
            np.asarray(self.frequencies, np.float32), "frequencies", np.float32, (None,)
        )
        made = s.Rope.new(
            n_dims=2 * len(kept),
            interleaved=bool(self.interleaved),
            frequencies=kept.ctypes.data,
            n_positions=checks.count(self.n_positions, "n_positions", least=0),
            n_position_transforms=checks.count(
                self.n_position_transforms, "n_position_transforms", least=0
            ),
            block_centers=bool(self.block_centers),
        )
        made.kept = kept
        return made
