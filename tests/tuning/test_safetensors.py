"""Any bytes as a safetensors file. The file is refused with one line that names it, or every tensor
lies inside the file and has the bytes of its shape.
"""

import json
import math
import pathlib
import random
import tempfile
import unittest

import numpy as np
from kvant.tuning import safetensors
from kvant.tuning.safetensors import Damaged

DATA = bytes(range(96))
HEADER = {
    "__metadata__": {"model": "m", "ctx": "96"},
    "a": {"dtype": "F16", "shape": [2, 3, 4], "data_offsets": [0, 48]},
    "b": {"dtype": "I32", "shape": [4], "data_offsets": [48, 64]},
    "c": {"dtype": "F64", "shape": [], "data_offsets": [64, 72]},
    "d": {"dtype": "F32", "shape": [0, 7], "data_offsets": [72, 72]},
    "e": {"dtype": "F64", "shape": [3, 1], "data_offsets": [72, 96]},
}


def file_of(header, data=DATA):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(header).to_bytes(8, "little") + header + data


class Files(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "file"

    def refused(self, data, words):
        self.path.write_bytes(data)
        with self.assertRaises(Damaged) as caught:
            safetensors.File(self.path)
        self.assertTrue(str(caught.exception).startswith(f"{self.path}: "))
        self.assertIn(words, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))

    def changed(self, name, **members):
        return file_of({**HEADER, name: {**HEADER[name], **members}})

    def test_numbers_are_those_of_the_file(self):
        self.path.write_bytes(file_of(HEADER))
        with safetensors.File(self.path) as file:
            self.assertEqual(file.metadata, HEADER["__metadata__"])
            np.testing.assert_array_equal(
                file.read("a"), np.frombuffer(DATA, "<f2", 24).reshape(2, 3, 4)
            )
            np.testing.assert_array_equal(file.read("b"), np.frombuffer(DATA, "<i4", 4, 48))
            self.assertEqual([file.read(name).shape for name in "cde"], [(), (0, 7), (3, 1)])

    def test_what_does_not_fit_is_refused(self):
        for data, words in [
            (b"", "0 bytes"),
            (b"1234567", "7 bytes"),
            (b"\xff" * 64, "cut short"),
            ((safetensors.MAX_HEADER + 1).to_bytes(8, "little") + b" " * 64, "a header of"),
            (file_of(b""), "JSON object"),
            (file_of(b"[]"), "JSON object"),
            (file_of(b"{\xff}"), "JSON object"),
            (file_of(b'{"a":' * 100_000), "JSON object"),
            (file_of(json.dumps(HEADER)[:-2].encode()), "JSON object"),
            (file_of(b'{"a":1,"a":1}'), "one name"),
            (file_of({**HEADER, "__metadata__": {"ctx": 96}}), "__metadata__"),
            (file_of({**HEADER, "a": 3}), "unknown type"),
            (self.changed("a", dtype="F17"), "'a' has an unknown type"),
            (self.changed("a", dtype=["F16"]), "unknown type"),
            (self.changed("a", shape=[2, 3, 5]), "'a': its shape"),
            (self.changed("a", shape=[2, 3, -4]), "'a': shape"),
            (self.changed("a", shape=[2, 3.0, 4]), "'a': shape"),
            (self.changed("a", shape=[True, 6, 4]), "'a': shape"),
            (self.changed("a", shape=[1] * 8 + [24]), "'a': shape"),
            (self.changed("a", shape=[2**62, 2**62, 24]), "'a': its shape"),
            (self.changed("a", data_offsets=[0]), "data_offsets"),
            (self.changed("a", data_offsets=None), "data_offsets"),
            (self.changed("b", data_offsets=[44, 60]), "overlaps"),
            (self.changed("e", shape=[2, 1], data_offsets=[80, 96]), "hole"),
            (file_of({**HEADER, "\ud800": HEADER["b"]}), r"'\ud800' overlaps"),
            (file_of(HEADER, DATA[:-1]), "cut short"),
            (file_of(HEADER, DATA + b"x"), "cut short or damaged"),
        ]:
            with self.subTest(words=words, data=data[:80]):
                self.refused(data, words)

    def test_a_file_that_shrinks(self):
        self.path.write_bytes(file_of(HEADER))
        with safetensors.File(self.path) as file:
            with open(self.path, "r+b") as other:
                other.truncate(self.path.stat().st_size - 8)
            with self.assertRaises(Damaged):
                file.read("e")

    def test_mutated_headers_are_never_believed_against_their_own_sizes(self):
        """Digits and punctuation are the lengths and the structure."""
        rng, valid, believed = random.Random(7), json.dumps(HEADER).encode(), 0
        for _ in range(8000):
            text = bytearray(valid)
            for _ in range(rng.randint(1, 3)):
                at = rng.randrange(len(text))
                text[at] = (
                    text[at] ^ 1 << rng.randrange(8)
                    if rng.random() < 0.25
                    else rng.choice(b'0123456789-.e{}[],:"\\ ')
                )
            try:
                tensors, metadata = safetensors.parse(bytes(text), len(DATA))
            except Damaged as error:
                self.assertNotIn("\n", str(error))
                continue
            believed, at = believed + 1, 0
            for entry in sorted(
                tensors.values(), key=lambda entry: (entry.offset, math.prod(entry.shape))
            ):
                self.assertEqual(entry.offset, at)
                at += math.prod(entry.shape) * entry.dtype.itemsize
            self.assertEqual(at, len(DATA))
            self.assertTrue(all(isinstance(word, str) for word in metadata.values()))
        self.assertGreater(believed, 100)  # names and metadata may be anything


if __name__ == "__main__":
    unittest.main()
