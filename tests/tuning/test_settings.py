"""Choices as settings files: the codecs of layers and kv heads, and the calibration that belongs to
them.
"""

import pathlib
import shutil
import tempfile
import unittest

import kvant
from kvant.tuning import captures, mixes, sensitivity, settings

CALIBRATION = pathlib.Path(__file__).resolve().parents[1] / "vectors" / "vectors.kvcal"
SHAPE = captures.Shape(2, 4, (64, 32), 0.125, 0.0, 0.0, 0)
SPECS = ["turboquant-2", "turboquant-4", "turboquant-4:center=file"]
HEADS = [(0, 0), (1, 1), (2, 2), (0, 1)]


class Files(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name).resolve()
        self.path = self.folder / "model.kvant"
        locations = [
            sensitivity.Site(
                layer, role, SHAPE, 64, SPECS, [mixes.Mix(0.0, 0.0, heads) for heads in HEADS]
            )
            for layer in range(2)
            for role in "kv"
        ]
        self.calibration = self.folder / "model.kvcal"
        shutil.copy(CALIBRATION, self.calibration)
        info = kvant.Calibration(self.calibration).info
        self.writer = settings.Writer(locations, "a model", 0x1234, (self.calibration, info))

    def saved(self, setting, path=None):
        self.writer.save(setting, path or self.path)
        return kvant.Settings.load(path or self.path)

    def test_layers_and_kv_heads(self):
        found = self.saved([None, 1, 3, 0])
        self.assertEqual(
            (found.info.model, found.info.model_fingerprint, found.info.n_layers),
            ("a model", 0x1234, 2),
        )
        self.assertEqual(found.layer(0, "k"), ("f16", 2, 64))
        self.assertEqual(found.layer(0, "v"), ("turboquant-4", 2, 32))
        self.assertEqual(found.layer(1, "k"), (("turboquant-2", "turboquant-4"), 2, 64))
        self.assertEqual(found.layer(1, "v"), ("turboquant-2", 2, 32))

    def test_a_calibration_that_nothing_needs_is_not_named(self):
        self.assertIsNone(self.saved([0, 1, 3, None]).info.calibration)

    def test_a_calibration_beside_the_file_goes_by_its_name(self):
        found = self.saved([0, 0, 2, 0])
        self.assertEqual(found.info.calibration, "model.kvcal")
        self.assertEqual(found.load_calibration().info, kvant.Calibration(CALIBRATION).info)

    def test_one_elsewhere_by_its_path(self):
        other = self.folder / "other"
        other.mkdir()
        found = self.saved([0, 0, 2, 0], other / "model.kvant")
        self.assertEqual(found.info.calibration, str(self.calibration))
        self.assertIsNotNone(found.load_calibration())


if __name__ == "__main__":
    unittest.main()
