"""Allocation of choices to sites, against a search of all combinations."""

import itertools
import math
import random
import unittest

import numpy as np
from kvant.tuning import allocate

SITES, CHOICES = 6, 4


def problem(rng):
    """Losses that fall with bytes by about a factor per step, as losses of codecs do. Some choices
    have more bytes and a larger loss.
    """
    locations = []
    for _ in range(SITES):
        weight = math.exp(3 * rng.random())
        locations.append(
            [
                (100 * (c + 1) + rng.randrange(20), weight * (3 + rng.random()) ** -c)
                for c in range(CHOICES)
            ]
        )
    return locations


def all_totals(locations):
    """Bytes and loss of all combinations."""
    picks = np.array(list(itertools.product(range(CHOICES), repeat=SITES)))
    return np.array(locations)[np.arange(SITES), picks].sum(axis=1).T


class Allocate(unittest.TestCase):
    def test_close_to_the_best(self):
        rng, exact, losses, best_losses = random.Random(11), 0, 0.0, 0.0
        for _ in range(60):
            locations, budget = problem(rng), 650 + 1600 * rng.random()
            sizes, all_losses = all_totals(locations)
            chosen = allocate.allocate(locations, budget)
            self.assertEqual(chosen is not None, bool((sizes <= budget).any()))
            if chosen is None:
                continue
            size, loss = allocate.total(locations, chosen)
            best = all_losses[sizes <= budget].min()
            self.assertLessEqual(size, budget)
            self.assertGreaterEqual(loss, best * (1 - 1e-12))
            # No exchange between two sites helps. An exchange among three could, so not every round
            # is exact.
            exact += loss <= best * (1 + 1e-12)
            losses += loss
            best_losses += best
        self.assertGreaterEqual(exact, 45)
        self.assertLessEqual(losses, 1.02 * best_losses)

    def test_no_exchange_of_two_helps(self):
        rng = random.Random(5)
        for _ in range(20):
            locations, budget = problem(rng), 900 + 1000 * rng.random()
            chosen = allocate.allocate(locations, budget)
            size, loss = allocate.total(locations, chosen)
            for i, j in itertools.permutations(range(SITES), 2):
                for c, d in itertools.product(range(CHOICES), repeat=2):
                    other = list(chosen)
                    other[i], other[j] = c, d
                    other_size, other_loss = allocate.total(locations, other)
                    self.assertTrue(other_size > budget or other_loss >= loss * (1 - 1e-9))
            self.assertLessEqual(size, budget)

    def test_a_budget_that_is_too_small(self):
        locations = [[(20, 0), (10, 5), (10, 3)]] * 2
        self.assertIsNone(allocate.allocate(locations, 19))
        self.assertEqual(allocate.allocate(locations, 20), [2, 2])
        self.assertEqual(allocate.allocate(locations, 30), [0, 2])  # ties go to the earlier site
        self.assertEqual(allocate.allocate(locations, 1000), [0, 0])

    def test_more_bytes_are_no_reason(self):
        self.assertEqual(allocate.allocate([[(10, 1), (20, 1), (30, 2)]], 100), [0])
        self.assertEqual(allocate.allocate([], 0), [])

    def test_a_pair_of_moves_where_neither_fits_or_gains_alone(self):
        """The greedy climb gives site 1 its larger choice first, because that saves more per byte.
        Site 0's larger choice saves more in all.
        """
        locations = [[(10, 10), (20, 3)], [(10, 5), (15, 1)]]
        self.assertEqual(allocate.allocate(locations, 30), [1, 0])


if __name__ == "__main__":
    unittest.main()
