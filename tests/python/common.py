"""Helpers of the Python package's tests: the package on the path, rows, hashes, refusals."""

import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "integrations" / "python"))

import numpy as np  # noqa: E402

MASK = 2**64 - 1


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def fnv1a(data, value=0xCBF29CE484222325):
    for byte in bytes(data):
        value = (value ^ byte) * 0x100000001B3 & MASK
    return value


class TestCase(unittest.TestCase):
    def refused(self, error, words, call, *arguments, **named):
        """The call must raise the error, with a message that contains each of the words, which |
        separates.
        """
        with self.assertRaises(error) as raised:
            call(*arguments, **named)
        for word in words.split("|"):
            self.assertIn(word, str(raised.exception))
        return raised.exception
