"""kvant needle: whether a model still finds a fact in a long text."""

import math
import pathlib
import tempfile
import unittest

from testing import MODEL, SMALL, TEXT, rows_of, run

RUNTIME = 1
# SmolLM2-135M-Instruct.
N_LAYERS, N_KV_HEADS, HEAD_DIM = 30, 3, 64


class Needle(unittest.TestCase):
    @classmethod
    def rows(cls, *more):
        return rows_of(run("needle", "-m", MODEL, "-n", "3", "-r", "1", "--json", *more))

    @classmethod
    def setUpClass(cls):
        cls.first = cls.rows("-c", "256,320", "-k", "int-8", "-k", "turboquant-1")

    def test_rows(self):
        self.assertEqual(
            [(row["ctx"], row["k"]) for row in self.first],
            [
                (ctx, k)
                for ctx in (256, 320)
                for k in ("f16", "int-8", "turboquant-1")
                for _ in range(3)
            ],
        )
        self.assertEqual([row["depth"] for row in self.first], 6 * [1 / 6, 3 / 6, 5 / 6])
        for row in self.first:
            self.assertEqual(row["trials"], 1)
            self.assertIn(row["exact"], (0, 1))
            self.assertLess(row["log_probability"], 0)

    def test_memory(self):
        # llama.cpp allocates whole blocks of 256 cells; kvant's memory is the memory that was
        # touched.
        sizes = {(row["ctx"], row["k"]): row["kv_bytes"] for row in self.first}
        self.assertEqual(len(sizes), 6)
        for ctx, cells in ((256, 256), (320, 512)):
            self.assertEqual(sizes[ctx, "f16"], 2 * cells * N_LAYERS * N_KV_HEADS * HEAD_DIM * 2)
            self.assertLess(sizes[ctx, "int-8"], sizes[ctx, "f16"])
            self.assertLess(sizes[ctx, "turboquant-1"], sizes[ctx, "int-8"])
            self.assertGreater(sizes[ctx, "turboquant-1"], 0)

    def test_few_bits_forget(self):
        def mean(codec):
            return sum(row["log_probability"] for row in self.first if row["k"] == codec) / 6

        # Five digits by chance: five times ln 10.
        self.assertGreater(mean("f16"), -5 * math.log(10))
        self.assertLess(abs(mean("int-8") - mean("f16")), mean("int-8") - mean("turboquant-1"))
        self.assertLess(mean("turboquant-1"), mean("f16") - 1)

    def test_texts_are_the_seeds(self):
        def figures(*more):
            words = ("-m", SMALL, "-n", "3", "-r", "1", "--json", "--stock", "f16")
            return [row["log_probability"] for row in rows_of(run("needle", *words, *more))]

        first = figures("-c", "256")
        self.assertEqual(len(first), 3)
        self.assertEqual(figures("-c", "256,320", "-k", "int-8")[:3], first)
        seed, text = figures("-c", "256", "--seed", "2"), figures("-c", "256", "-f", TEXT)
        self.assertNotIn(first, (seed, text))
        self.assertNotEqual(seed, text)

    def test_contexts_that_do_not_suit(self):
        done = run("needle", "-m", SMALL, "-c", "1000000")
        self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""))
        self.assertIn("longer than the model's limit of", done.stderr)
        done = run("needle", "-m", SMALL, "-c", "256", "-n", "24")
        self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""))
        self.assertIn("too short for all needles", done.stderr)


class NeedleResumed(unittest.TestCase):
    def test_resumed(self):
        first = Needle.rows("-c", "256,320", "-k", "int-8", "-k", "turboquant-1")
        with tempfile.TemporaryDirectory() as folder:
            state = pathlib.Path(folder) / "needles"
            more = ("-c", "256,320", "-k", "int-8", "-k", "turboquant-1", "--resume", state)
            self.assertEqual(
                Needle.rows("-c", "320", "-k", "turboquant-1", "--resume", state),
                [row for row in first if row["ctx"] == 320 and row["k"] in ("f16", "turboquant-1")],
            )
            kept = state.read_bytes()
            self.assertEqual(Needle.rows(*more), first)
            self.assertTrue(state.read_bytes().startswith(kept))
            complete = state.read_bytes()
            record = (len(complete) - len(kept)) // 4
            self.assertEqual(
                len(kept) + 4 * record,
                len(complete),
                "two texts, two configurations: four more records",
            )
            # Complete results are not measured again; a torn line is.
            self.assertEqual(Needle.rows(*more), first)
            self.assertEqual(state.read_bytes(), complete)
            state.write_bytes(complete[:-1])
            self.assertEqual(Needle.rows(*more), first)
            done = run("needle", "-m", MODEL, "-n", "4", "-c", "256", "--resume", state)
            self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""))
            self.assertIn("number of needles", done.stderr)


if __name__ == "__main__":
    unittest.main()
