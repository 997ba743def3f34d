"""Which contexts of which text are measured, and which the check takes: never the same; and what is made of divergences."""

import unittest

import numpy as np
from kvant.tuning import probes
from kvant.tuning.probes import Contexts


class WhichContexts(unittest.TestCase):
    def test_checks_take_what_follows(self):
        self.assertEqual(probes.measured_contexts(["a", "b"], 3), Contexts(("a", "b"), 3, 0, 3))
        self.assertEqual(probes.check_contexts(["a"], 1, 2), [Contexts(("a",), 1, 1, 2)])
        self.assertEqual(probes.check_contexts(["a"], 3, 4), [Contexts(("a",), 3, 3, 4)])

    def test_checks_are_dealt_to_the_parts_in_turn(self):
        """Parts are numbered text by text: of two texts in two parts, one check is the first part's, the third the second text's."""
        self.assertEqual(probes.check_contexts(["a", "b"], 2, 1), [Contexts(("a",), 2, 2, 1)])
        self.assertEqual(probes.check_contexts(["a", "b"], 2, 3), [Contexts(("a",), 2, 2, 2), Contexts(("b",), 2, 2, 1)])
        self.assertEqual(probes.check_contexts(["a", "b"], 2, 5), [Contexts(("a",), 2, 2, 3), Contexts(("b",), 2, 2, 2)])

    def test_a_text_of_its_own(self):
        self.assertEqual(probes.check_contexts(["a"], 2, 5, "own"), [Contexts(("own",), 1, 0, 5)])

    def test_words(self):
        words = "-f a -f b --spread 3 --skip 3 --chunks 2".split()
        self.assertEqual(Contexts(("a", "b"), 3, 3, 2).words(), words)

    def test_texts_are_long_enough_for_both(self):
        """kvant eval wants two contexts of a text whatever is asked for."""
        for arguments, needed in [((1, 1, 1), 2), ((1, 1, 2), 3), ((1, 3, 4), 9), ((2, 2, 1), 4), ((1, 1, 2, "own"), 2),
                                  ((1, 4, 2, "own"), 4)]:
            self.assertEqual(probes.contexts_needed(*arguments)[0], needed, arguments)
        self.assertEqual([probes.contexts_needed(1, 1, n, "own")[1] for n in (1, 2, 3)], [2, 2, 3])


class Means(unittest.TestCase):
    def test_contexts_count_alike(self):
        rng = np.random.default_rng(2)
        kld = rng.normal(3, 1, (4, 1000)) + np.arange(4)[:, None]
        mean, error = probes.mean_and_error(kld)
        self.assertAlmostEqual(mean, kld.mean())
        # What differs between contexts is no error of the mean over these contexts.
        self.assertAlmostEqual(error, 1 / np.sqrt(4000), delta=2e-3)


if __name__ == "__main__":
    unittest.main()
