"""scripts/figures: files are up to date, and words can be read on a phone."""

import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "figures"
sys.path.insert(0, str(SCRIPT))

import draw  # noqa: E402

PHONE = 390 - 2 * 16  # CSS pixels of a figure on a phone, without the margins of GitHub's pages
SMALL = 11  # pixels: the smallest words in the interfaces of phones
# Ems per character: DejaVu Sans, a wide font, takes 0.53 for the longest line of the figures.
EM = 0.55


class Figures(unittest.TestCase):
    def test_files_are_what_the_script_draws(self):
        command = [sys.executable, str(SCRIPT), "--check"]
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))

    def words(self):
        """(file, x, anchor, font size, text) of all words."""
        pattern = r'<text x="([\d.]+)".*?text-anchor="(\w+)" font-size="(\d+)".*?>(.*?)</text>'
        files = sorted((ROOT / "docs" / "figures").glob("*-light.svg"))
        self.assertGreater(len(files), 0)
        for file in files:
            for x, anchor, size, words in re.findall(pattern, file.read_text()):
                yield file.name, float(x), anchor, int(size), words

    def test_words_stay_in_the_figure(self):
        for file, x, anchor, size, words in self.words():
            width = EM * size * len(words)
            left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
            self.assertGreaterEqual(left, 0, f"{file}: {words}")
            self.assertLessEqual(left + width, draw.WIDTH, f"{file}: {words}")

    def test_small_words_are_refused(self):
        self.assertGreaterEqual(draw.SMALLEST * PHONE / draw.WIDTH, SMALL)
        canvas = draw.Canvas("light", 100, "title")
        with self.assertRaises(ValueError):
            canvas.text(0, 0, "words", size=draw.SMALLEST - 1)

    def test_both_themes_have_the_same_colours(self):
        self.assertEqual(*(set(colors) for colors in draw.THEMES.values()))


class Scales(unittest.TestCase):
    def test_linear(self):
        self.assertEqual([draw.Scale((0, 10), (100, 200))(x) for x in (0, 5, 10)], [100, 150, 200])

    def test_logarithmic(self):
        scale = draw.Scale((1, 100), (0, 2), log=True)
        for value, place in ((1, 0), (10, 1), (100, 2)):
            self.assertAlmostEqual(scale(value), place)


if __name__ == "__main__":
    unittest.main()
