"""Errors on disk: they are found again only under the same key, and computed again if the file is
damaged.
"""

import json
import pathlib
import tempfile
import unittest

from kvant.tuning import captures, store

SHAPE = captures.Shape(2, 4, (64, 32), 0.125, 0.0, 0.0, 512)
NAME = (3, "cost", "k", "trellis-2:transform=file,sink=0")


class Files(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "errors"
        made = store.Store(self.path, "one")
        self.assertEqual(made.layers, {})
        made.take_layers({3: SHAPE})
        made.keep(*NAME, [0.25, 0.5])
        made.save()

    def test_found_again(self):
        again = store.Store(self.path, "one")
        self.assertEqual(again.layers, {3: SHAPE})
        self.assertEqual(again.get(*NAME), [0.25, 0.5])
        self.assertFalse(again.has(3, "probe", *NAME[2:]))

    def test_another_key_has_a_part_of_its_own(self):
        other = store.Store(self.path, "two")
        self.assertEqual(other.layers, {})
        self.assertFalse(other.has(*NAME))
        other.save()
        self.assertTrue(store.Store(self.path, "one").has(*NAME))

    def test_damage(self):
        """A file that is cut short, or has other shapes, counts as missing."""
        whole = self.path.read_text()
        for text in (
            whole[:-9],
            "[]",
            "3",
            "{}",
            json.dumps({"one": []}),
            json.dumps({"one": {"layers": {"3": [1]}, "errors": {}}}),
            whole.replace("0.25, ", ""),
            whole.replace("0.25", "NaN"),
            whole.replace("0.25", '"x"'),
            "\0",
        ):
            with self.subTest(text=text):
                self.assertNotEqual(text, whole)
                self.path.write_text(text)
                found = store.Store(self.path, "one")
                self.assertEqual(found.layers, {})
                self.assertFalse(found.has(*NAME))
                found.save()


class Keys(unittest.TestCase):
    def test_contents_and_facts_count(self):
        with tempfile.TemporaryDirectory() as folder:
            a, b = (pathlib.Path(folder) / name for name in "ab")
            a.write_text("a text")
            b.write_text("a text")
            self.assertEqual(store.key_of([a], 1), store.key_of([b], 1))
            self.assertNotEqual(store.key_of([a], 1), store.key_of([a], 2))
            self.assertNotEqual(store.key_of([a], 1), store.key_of([a, b], 1))
            b.write_text("another text")
            self.assertNotEqual(store.key_of([a], 1), store.key_of([b], 1))


if __name__ == "__main__":
    unittest.main()
