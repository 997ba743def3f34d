"""bench/long_contexts.py: its q8_0 and q4_0 are rotated as llama.cpp rotates them."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "bench"))

import long_contexts  # noqa: E402
import torch  # noqa: E402


def by_hand(rows, n):
    """Blocks of n channels times the matrix of ggml_gen_hadamard, by its closed form."""
    signs = [[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    matrix = torch.tensor(signs, dtype=torch.float64) / n**0.5
    return (rows.double().unflatten(-1, (-1, n)) @ matrix).flatten(-2)


class Rotated(unittest.TestCase):
    def test_blocks(self):
        """llama.cpp rotates keys in the largest block that divides head_dim, values in blocks of
        64, and no head that is no multiple of 64.
        """
        for d, role, block in (
            (64, "k", 64),
            (128, "k", 128),
            (192, "k", 64),
            (256, "k", 256),
            (256, "v", 64),
            (80, "k", 0),
            (80, "v", 0),
        ):
            seen = []

            def keep(rows, seen=seen):
                seen.append(rows)
                return rows

            rows = torch.randn(2, 3, 5, d, generator=torch.Generator().manual_seed(d))
            back = long_contexts.rotated(keep)(rows, role)
            expected = by_hand(rows, block) if block else rows.double()
            self.assertLess((seen[0] - expected).abs().max(), 1e-5)  # fp32 sums of 256 numbers
            self.assertLess((back - rows).abs().max(), 1e-5)

    def test_stock_caches_are_rotated(self):
        """A channel that is 100 times as large spoils its group of 32 only without a rotation."""
        rows = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
        rows[:, 3] *= 100
        others = [i for i in range(32) if i != 3]
        for name in ("q8_0", "q4_0"):
            plain, stock = getattr(long_contexts, name), long_contexts.STOCK[name]
            lost = [(x - rows)[:, others].square().mean() for x in (plain(rows), stock(rows, "k"))]
            self.assertLess(lost[1], lost[0])


if __name__ == "__main__":
    unittest.main()
