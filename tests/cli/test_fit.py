"""bench/fit.py, bench/sizes.py and their results: the memory of caches for models that people know,
and for shapes of models at many contexts.
"""

import csv
import itertools
import pathlib
import sys
import tempfile
import unittest

from testing import KVANT

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import fit  # noqa: E402
import sizes  # noqa: E402

CACHES = ("f16", "q8_0", "q4_0", "quality", "balanced", "small", "tiny")
with open(ROOT / "bench" / "results" / "fit.csv", newline="", encoding="utf-8") as file:
    LINES = list(csv.DictReader(file))


def key_of(line):
    return line["model"], line["memory"], line["cache"], int(line["context"])


class Fit(unittest.TestCase):
    def test_every_cell_is_there_once(self):
        wanted = itertools.product(fit.shapes(), ("cpu", "gpu"), CACHES, fit.CONTEXTS)
        self.assertEqual(sorted(map(key_of, LINES)), sorted(wanted))
        for line in LINES:
            shape = fit.shapes()[line["model"]]
            self.assertEqual([line[key] for key in fit.FACTS], [shape[key] for key in fit.FACTS])

    def test_llama_cpps_own_are_two_bytes_a_number(self):
        """If all layers are alike, each layer has keys and values of every token."""
        of = [line for line in LINES if line["cache"] == "f16" and line["window"] == "0"]
        self.assertGreater(len(of), 0)
        for line in of:
            numbers = 2 * int(line["layers"]) * int(line["kv_heads"]) * int(line["head_dim"])
            self.assertEqual(int(line["kv_bytes"]), 2 * numbers * int(line["context"]))

    def test_windows_keep_their_cells_only(self):
        """llama.cpp keeps a window and one batch of 512 tokens, in steps of 256 cells. One of six
        layers of Gemma 3, and every second layer of gpt-oss, has all tokens.
        """
        layers = {"Gemma-3-12B": (8, 40, 1536), "gpt-oss-20b": (12, 12, 768)}
        for model, (whole, windowed, cells) in layers.items():
            of = [line for line in LINES if line["model"] == model and line["cache"] == "f16"]
            self.assertEqual(len(of), 2 * len(fit.CONTEXTS))
            for line in of:
                rows = whole * int(line["context"]) + windowed * cells
                width = int(line["kv_heads"]) * int(line["head_dim"])
                self.assertEqual(int(line["kv_bytes"]), 2 * 2 * width * rows)

    def test_the_lines_are_what_the_plug_in_says(self):
        """A page shows three digits, so sizes may have changed by a hundredth since then."""
        kept = {key_of(line): line for line in LINES}
        models = {name: fit.shapes()[name] for name in ("Llama-3.1-8B", "gpt-oss-20b")}
        with tempfile.TemporaryDirectory() as folder:
            for cells in fit.lines(KVANT, models, folder):
                now = dict(zip(fit.COLUMNS, cells))
                for key in ("kv_bytes", "transform_bytes", "exact_bytes", "working_bytes"):
                    was = int(kept[key_of(now)][key])
                    self.assertLessEqual(abs(now[key] - was), 0.01 * was, (key_of(now), key))


class Sizes(unittest.TestCase):
    """Pages take the memory of caches from sizes.csv."""

    @classmethod
    def setUpClass(cls):
        with open(ROOT / "bench" / "results" / "sizes.csv", newline="", encoding="utf-8") as file:
            # without the commit and the command
            cls.lines = [line[:-2] for line in csv.reader(file)][1:]

    def test_every_cell_is_there_once(self):
        wanted = [
            [model, cache, str(context)]
            for model in sizes.SHAPES
            for cache in sizes.CACHES
            for context in (sizes.FINER if model == sizes.DRAWN else sizes.CONTEXTS)
        ]
        self.assertEqual([[line[0], *line[4:6]] for line in self.lines], wanted)

    def test_the_lines_are_what_the_plug_in_says(self):
        models = ("SmolLM2-135M", sizes.DRAWN)
        kept = {tuple(line[:6]): line for line in self.lines}
        for now in sizes.lines(KVANT, models, finer=False):
            now = [str(cell) for cell in now]
            self.assertEqual(kept[tuple(now[:6])], now, "run bench/sizes.py again")


if __name__ == "__main__":
    unittest.main()
