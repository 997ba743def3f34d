"""Mixes of candidates over kv heads, against all possible mixes."""

import itertools
import math
import random
import unittest

from kvant.tuning import mixes

HEADS, CANDIDATES = 3, 6
KINDS = ["without a page", "with a page"] * (CANDIDATES // 2)  # one kind keeps a page in fp16


def problem(rng, n_heads=HEADS):
    """Sizes, and errors that fall by about a factor per step of bytes."""
    sizes = [100 * (c // 2 + 1) + (30 if c % 2 else 0) for c in range(CANDIDATES)]
    weights = [math.exp(4 * rng.random()) for _ in range(n_heads)]
    return sizes, [
        [weight * (2 + 3 * rng.random()) ** -(c // 2) for weight in weights]
        for c in range(CANDIDATES)
    ]


def of(heads, sizes, errors):
    return sum(sizes[c] for c in heads), sum(errors[c][head] for head, c in enumerate(heads))


def fit(heads):
    return len({KINDS[c] for c in heads}) == 1


class Mixes(unittest.TestCase):
    def test_first_comes_one_candidate_for_all(self):
        sizes, errors = problem(random.Random(3))
        found = mixes.make(KINDS, sizes, errors)
        self.assertGreater(len(found), CANDIDATES)
        for c in range(CANDIDATES):
            self.assertEqual(found[c].heads, (c,) * HEADS)
            self.assertEqual(found[c][:2], of(found[c].heads, sizes, errors))

    def test_every_mix_is_the_best_of_its_bytes(self):
        """A path of best steps is best at each of its points: no mix of the same kind has a smaller
        error in as many bytes.
        """
        rng = random.Random(4)
        everything = list(filter(fit, itertools.product(range(CANDIDATES), repeat=HEADS)))
        for _ in range(50):
            sizes, errors = problem(rng)
            totals = [(heads, *of(heads, sizes, errors)) for heads in everything]
            for mix in mixes.make(KINDS, sizes, errors)[CANDIDATES:]:
                self.assertTrue(fit(mix.heads))
                self.assertGreater(len(set(mix.heads)), 1)
                self.assertEqual(mix[:2], of(mix.heads, sizes, errors))
                least = min(
                    error
                    for heads, size, error in totals
                    if size <= mix.bytes and KINDS[heads[0]] == KINDS[mix.heads[0]]
                )
                self.assertLessEqual(mix.error, least * (1 + 1e-12))

    def test_one_kv_head_has_nothing_to_mix(self):
        self.assertEqual(len(mixes.make(KINDS, *problem(random.Random(5), 1))), CANDIDATES)


if __name__ == "__main__":
    unittest.main()
