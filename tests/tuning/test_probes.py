"""Which contexts of which text are measured and which are checked, which are never the same. Also
the computation from divergences.
"""

import unittest

import numpy as np
from kvant.tuning import probes
from kvant.tuning.probes import Contexts


WINDOW = probes.Window(64, 32)


def checks(texts, parts, n_checks, report=None):
    return probes.check_contexts(texts, parts, n_checks, 64, report)


class WhichContexts(unittest.TestCase):
    def test_checks_take_what_follows(self):
        half = probes.Window(32, 8)
        probed = probes.probe_contexts(["a", "b"], 3, 64)
        self.assertEqual(probed, Contexts(("a", "b"), 3, 0, 1, half, 64))
        self.assertEqual(checks(["a"], 1, 2), [Contexts(("a",), 1, 1, 2, WINDOW)])
        self.assertEqual(checks(["a"], 3, 4), [Contexts(("a",), 3, 3, 4, WINDOW)])
        self.assertEqual(checks(["a"], 3, 0), [])
        self.assertEqual(checks(["a"], 3, 0, "own"), [])

    def test_a_probe_is_longer_than_the_fp16_part(self):
        """Half of the context is probed. A cache of 256 tokens keeps 4 blocks as fp16. They are the
        first block, two for the newest 64 tokens, and one for the 64 tokens that a probe writes at
        once.
        """
        for n_ctx in (64, 512):
            self.assertEqual(probes.least_context(n_ctx), 640)
        for n_ctx in (640, 1000, 2048):
            self.assertEqual(probes.least_context(n_ctx), n_ctx)

    def test_checks_are_dealt_to_the_parts_in_turn(self):
        """Parts are numbered text by text. With two texts in two parts each, the first check is in
        the first text, the third check in the second text.
        """
        self.assertEqual(checks(["a", "b"], 2, 1), [Contexts(("a",), 2, 2, 1, WINDOW)])
        self.assertEqual(
            checks(["a", "b"], 2, 3),
            [Contexts(("a",), 2, 2, 2, WINDOW), Contexts(("b",), 2, 2, 1, WINDOW)],
        )
        self.assertEqual(
            checks(["a", "b"], 2, 5),
            [Contexts(("a",), 2, 2, 3, WINDOW), Contexts(("b",), 2, 2, 2, WINDOW)],
        )

    def test_a_text_of_its_own(self):
        self.assertEqual(checks(["a"], 2, 5, "own"), [Contexts(("own",), 1, 0, 5, WINDOW)])

    def test_words(self):
        words = "-f a -f b --spread 3 --skip 3 --chunks 2 -c 64 --from 32".split()
        self.assertEqual(Contexts(("a", "b"), 3, 3, 2, WINDOW).words(), words)
        self.assertEqual(Contexts(("a", "b"), 3, 3, 2, WINDOW, 64).words(), [*words, "-b", "64"])
        self.assertEqual(Contexts(("a", "b"), 3, 3, 2, WINDOW).n_tokens, 2 * 2 * 64)

    def test_texts_are_long_enough_for_both(self):
        """kvant eval needs two contexts of a text, whatever the user asks for."""
        for arguments, needed in [
            ((1, 1, 1), 2),
            ((1, 1, 2), 3),
            ((1, 3, 4), 9),
            ((2, 2, 1), 4),
            ((1, 1, 2, "own"), 2),
            ((1, 4, 2, "own"), 4),
        ]:
            self.assertEqual(probes.contexts_needed(*arguments)[0], needed, arguments)
        self.assertEqual([probes.contexts_needed(1, 1, n, "own")[1] for n in (1, 2, 3)], [2, 2, 3])


class Means(unittest.TestCase):
    def test_contexts_count_alike(self):
        rng = np.random.default_rng(2)
        kld = rng.normal(3, 1, (4, 1000)) + np.arange(4)[:, None]
        mean, error = probes.mean_and_error(kld)
        self.assertAlmostEqual(mean, kld.mean())
        # A difference between contexts is no error of the mean over these contexts.
        self.assertAlmostEqual(error, 1 / np.sqrt(4000), delta=2e-3)


class Site:
    def __init__(self, probe_error, measured):
        self.probe_error, self.true = probe_error, measured


class Shares(unittest.TestCase):
    """Layers whose divergence is the sum of (k's error + factor x v's error) x a weight of the
    layer. The computation finds the parts again.
    """

    def setUp(self):
        rng = np.random.default_rng(3)
        self.layers = []
        for weight in rng.uniform(0.01, 0.5, 7):
            k, v = rng.uniform(0.01, 0.1, 2)
            self.layers.append((Site(k, weight * k), Site(v, 0.4 * weight * v)))
        self.found = [(k.true + v.true, 0.1 * (k.true + v.true)) for k, v in self.layers]

    def test_parts(self):
        probes.share(
            self.layers, self.found, sum(k.true for k, _ in self.layers[:: probes.KEYS_STEP])
        )
        for layer in self.layers:
            for location in layer:
                self.assertAlmostEqual(location.measured / location.true, 1, places=6)
                self.assertAlmostEqual(location.measured_se / location.true, 0.1, places=6)

    def test_keys_that_are_out_of_range_are_bounded(self):
        for of_keys in (-1.0, 100.0):
            probes.share(self.layers, self.found, of_keys)
            for k, v in self.layers:
                weights = [location.measured / location.probe_error for location in (k, v)]
                self.assertAlmostEqual(
                    abs(np.log(weights[1] / weights[0])), probes.LARGEST_LOG_FACTOR, places=6
                )


if __name__ == "__main__":
    unittest.main()
