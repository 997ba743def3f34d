"""bench/results/sizes.csv, from which pages take the memory of caches, is what the library says."""

import csv
import pathlib
import sys
import unittest

import common  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import sizes  # noqa: E402


class Sizes(unittest.TestCase):
    def test_the_file_is_what_the_library_computes(self):
        with open(ROOT / "bench" / "results" / "sizes.csv", newline="") as file:
            written = [line[:-2] for line in csv.reader(file)]  # without the commit and the command
        computed = [[str(cell) for cell in line] for line in sizes.lines()]
        self.assertEqual(written[1:], computed, "run bench/sizes.py again")

    def test_stock_types(self):
        # ggml's q8_0: 32 numbers of 8 bits and a scale of 16; q4_0: of 4 bits.
        numbers = 2 * 32 * 8 * 128 * 4096
        for cache, bits in (("f16", 16), ("q8_0", 8.5), ("q4_0", 4.5)):
            self.assertEqual(sizes.stock_bytes(cache, (32, 8, 128), 4096), (numbers * bits / 8, 0))


if __name__ == "__main__":
    unittest.main()
