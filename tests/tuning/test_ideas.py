"""bench/papers_ideas.py: W is the one that calibration.md defines, tiers keep the codec's bits and
find structure that is there, and a head is compared at equal true bits.
"""

import pathlib
import sys
import unittest

import numpy as np

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "bench"))

import papers_ideas as ideas  # noqa: E402

DIM, TOKENS = 64, 512


def rows(seed, deviations=1.0):
    return np.random.default_rng(seed).standard_normal((TOKENS, DIM)) * deviations


def error(found, exact):
    return np.square(found - exact).sum() / np.square(exact).sum()


class W(unittest.TestCase):
    def test_it_solves_its_equation(self):
        keys, queries = rows(1) @ rows(2)[:DIM], rows(3) @ rows(4)[:DIM]
        w, k = ideas.learned_w(keys, queries)
        q = ideas.damped(queries.T @ queries / TOKENS, TOKENS, 1)
        np.testing.assert_allclose(w @ w @ k @ w @ w, q, atol=1e-9 * np.abs(q).max())

    def test_large_heads_have_parts(self):
        keys = np.hstack([rows(5), rows(6), rows(7), rows(8)])
        w, _ = ideas.learned_w(keys, keys)
        self.assertEqual(np.abs(w[:64, 64:]).max(), 0)


class Tiers(unittest.TestCase):
    def test_their_bits_are_the_codecs(self):
        for dim in (64, 128, 256):
            for plan in ideas.tiers_of(dim, 3).values():
                self.assertEqual(sum(n for n, _ in plan), dim)
                self.assertEqual(sum(n * bits for n, bits in plan), 3 * dim)

    def test_one_tier_is_the_codec(self):
        some = rows(9)
        found = ideas.in_tiers(some, ((DIM, 3),), some, norms=False)
        np.testing.assert_allclose(found, ideas.rounded(some, 3), rtol=1e-5, atol=1e-5)

    def test_they_gain_where_half_of_the_directions_are_large(self):
        """Halves of deviations 4 and 1 lose 16 D(4) + D(2) with tiers. The codec spreads its error,
        and loses 17 D(3). D falls by 4 to 4.1 for each bit, so the ratio is 8.1/17 = 0.48 or less.
        A quarter more is left for the quantised norms, and for the chance in 512 rows.
        """
        some = rows(10, np.repeat([4.0, 1.0], DIM // 2))
        plan = ideas.tiers_of(DIM, 3)["two tiers"]
        whole = error(ideas.rounded(some, 3), some)
        for norms in (False, True):
            self.assertLess(error(ideas.in_tiers(some, plan, some, norms), some), 0.6 * whole)


class Comparison(unittest.TestCase):
    def test_equal_heads_have_a_ratio_of_one(self):
        kl = np.array([1e-3, 2e-3, 5e-3])
        for value, low, high in ideas.interval(kl, kl):
            self.assertEqual((value, low, high), (1, 1, 1))

    def test_half_of_the_divergence(self):
        kl = np.array([1e-3, 2e-3, 5e-3])
        for value, low, high in ideas.interval(kl / 2, kl):
            np.testing.assert_allclose((value, low, high), 0.5)


if __name__ == "__main__":
    unittest.main()
