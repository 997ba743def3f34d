"""Weights from noisy measurements, ranks, bytes of caches, and the candidates."""

import math
import unittest

import kvant
from kvant.tuning import captures, mixes, sensitivity

SHAPE = captures.Shape(2, 4, (64, 64), 0.125, 0.0, 0.0, 0)


def location(role, measured, error, se=1e-6):
    made = sensitivity.Site(0, role, SHAPE, 1024, ["a"], [mixes.Mix(1.0, error, (0, 0))])
    made.probe_error, made.measured, made.measured_se = error, measured, se
    return made


class Weights(unittest.TestCase):
    def test_exact_measurements_are_taken_as_they_are(self):
        locations = [
            location("k", 0.01, 0.1),
            location("k", 0.08, 0.2),
            location("v", 0.3, 0.1),
            location("v", 0.001, 0.1),
        ]
        sensitivity.weigh(locations)
        for s in locations:
            self.assertAlmostEqual(s.cost(0) / s.measured, 1, places=4)

    def test_noise_is_drawn_to_the_mean_of_the_role(self):
        """Errors are equal. Logarithms of weights lie between the measured weights and their mean;
        noisy weights are nearer to the mean.
        """
        locations = [
            location("k", 0.01, 0.1, 1e-4),
            location("k", 0.04, 0.1, 0.02),
            location("k", 0.0025, 0.1, 1e-5),
            location("v", 9.0, 0.1),
        ]
        sensitivity.weigh(locations)
        logs = [math.log(s.measured / 0.1) for s in locations[:3]]
        mean = sum(logs) / 3
        moved = [
            (math.log(s.weight) - y) / (mean - y) if abs(mean - y) > 1e-9 else 0
            for s, y in zip(locations, logs)
        ]
        self.assertTrue(0.05 < moved[1] < 1)
        self.assertTrue(0 <= moved[2] < 0.01 * moved[1])

    def test_a_measurement_within_its_error_stays_positive(self):
        locations = [
            location("k", -0.001, 0.1, 0.01),
            location("k", 0.01, 0.0),
            location("k", 0.01, 0.1),
        ]
        sensitivity.weigh(locations)
        self.assertTrue(all(s.weight > 0 and math.isfinite(s.weight) for s in locations))


class Bytes(unittest.TestCase):
    def test_cells(self):
        sliding = SHAPE._replace(window=512)
        self.assertEqual(sensitivity.n_cells(SHAPE, 8192), 8192)
        self.assertEqual(sensitivity.n_cells(sliding, 8192), 1024)  # the window and a batch
        self.assertEqual(sensitivity.n_cells(sliding, 640), 640)

    def test_pages_that_stay_fp16_count(self):
        """Settings files keep the first and newest tokens as fp16. These pages count next to those
        for codes, and so do windows that a codec asks for. Layers share the pages for a step."""
        for cells in (640, 4096):
            exact = kvant.Scheme("balanced", n_layers=1, n_kv_heads=1, head_dim=64).exact(cells)
            fp16, n = 64 * 64 * 2, cells // 64
            opened = exact.total // 64 + 1
            plain = kvant.Codec("turboquant-4", 64, "k")
            codes = n * plain.page_bytes
            self.assertEqual(sensitivity.bytes_of(plain, cells), codes + opened * fp16)
            # Windows of 256 rows end within a block, and two blocks are in reserve.
            recent = kvant.Codec("turboquant-4:recent=256", 64, "k")
            more = max(opened, 256 // 64 + 1 + 2)
            self.assertEqual(sensitivity.bytes_of(recent, cells), codes + more * fp16)
        plain = kvant.Codec("turboquant-4", 64, "k")
        self.assertEqual(sensitivity.bytes_of(plain, 64), plain.page_bytes + 64 * 64 * 2)

    def test_layers_share_the_pages_of_a_step(self):
        """A room has 512 rows, or as many as there are cells, of 128 numbers in 2 bytes each.
        Layers with a window are in a second cache. The widest layer of a cache counts."""
        wide, narrow = SHAPE._replace(n_kv_heads=4), SHAPE._replace(head_dim=(64, 32))
        sliding = SHAPE._replace(window=512)

        def made(*shapes, cells=4096):
            mix = [mixes.Mix(5.0, 0.1, (0, 0)), mixes.Mix(3.0, 0.2, (1, 1))]
            return [
                sensitivity.Site(layer, role, shape, cells, ["a", "b"], mix)
                for layer, shape in enumerate(shapes)
                for role in "kv"
            ]

        room = 512 * 128 * 2
        for locations, bytes in (
            (made(SHAPE), 2 * room),
            (made(SHAPE, SHAPE, SHAPE), 2 * room),
            (made(SHAPE, cells=200), 2 * 256 * 128 * 2),  # 200 cells are 4 blocks of 64
            (made(SHAPE, wide), 2 * 2 * room),
            (made(narrow), room + room // 2),
            (made(SHAPE, sliding, sliding, SHAPE), 4 * room),
        ):
            self.assertEqual(sensitivity.shared_bytes(locations), bytes)
            choice = [0] * len(locations)
            self.assertEqual(sensitivity.total_bytes(locations, choice), bytes + 5 * len(locations))
            self.assertEqual(sensitivity.least_bytes(locations), bytes + 3 * len(locations))

    def test_a_budget_pays_for_the_shared_pages(self):
        locations = [location("k", 0.01, 0.1), location("v", 0.01, 0.1)]  # of one byte each
        least = 2 + 2 * 512 * 128 * 2
        self.assertIsNone(sensitivity.choose(locations, least - 1))
        self.assertEqual(sensitivity.choose(locations, least), [0, 0])


class Candidates(unittest.TestCase):
    def test_all_can_be_made_and_differ(self):
        for calibrated, n in ((True, (21, 18)), (False, (11, 10))):
            found = sensitivity.default_candidates(calibrated)
            self.assertEqual((len(set(found["k"])), len(set(found["v"]))), n)
            for role, specs in found.items():
                self.assertIn("-2:", specs[0])  # the coarse candidate that is measured
                for spec in specs:
                    takes = kvant.needs_calibration(spec, role)
                    self.assertTrue(calibrated or not takes, spec)
                    if not takes:
                        kvant.Codec(spec, 64, role)

    def test_kinds_are_what_fits_into_one_cache(self):
        """The list agrees with the library: a tensor accepts codecs of one kind and refuses
        others.
        """
        codecs = [
            kvant.Codec(spec, 64, "k")
            for spec in sensitivity.default_candidates(False)["k"]
            + ["int-4:axis=channel,group=64", "int-4:recent=70"]
        ]
        for a in codecs:
            for b in codecs:
                try:
                    kvant.Tensor([a, b])
                    fits = True
                except kvant.Error:
                    fits = False
                self.assertEqual(fits, sensitivity.kind_of(a) == sensitivity.kind_of(b), (a, b))


if __name__ == "__main__":
    unittest.main()
