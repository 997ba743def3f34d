"""kvant eval --values keeps the values that its results are means of. --spread and --skip choose
the tokens.
"""

import json
import math
import statistics
import unittest

from test_cli_capture import OK, RUNTIME, read
from testing import ON_SMALL, run, temporary_folder

CTX = 64
ROWS = CTX - 1 - CTX // 2


class Values(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = temporary_folder(cls.addClassCleanup)
        cls.path = cls.folder / "values"
        cls.base = ["eval", *ON_SMALL, "-c", CTX, "-k", "turboquant-2", "--json"]
        cls.base += ["--resume", cls.path.with_name("state")]
        done = run(*cls.base, "--spread", 2, "--chunks", 3, "--values", cls.path, code=OK)
        cls.rows = json.loads(done.stdout)
        cls.metadata, cls.tensors = read(cls.path.read_bytes())

    def test_rows_are_made_of_them(self):
        self.assertEqual(self.metadata["format"], "kvant-values-1")
        self.assertEqual(self.metadata["configuration.1"], "turboquant-2")
        self.assertEqual(set(self.tensors), {"kld.0", "nll.0", "kld.1", "nll.1"})
        for i, row in enumerate(self.rows):
            (shape, kld), (_, nll) = self.tensors[f"kld.{i}"], self.tensors[f"nll.{i}"]
            self.assertEqual(shape, [3, ROWS])
            self.assertAlmostEqual(statistics.fmean(kld), row["kld_mean"], places=12)
            self.assertAlmostEqual(math.exp(statistics.fmean(nll)), row["ppl"], places=9)
            self.assertEqual(max(kld), row["kld_max"])

    def test_skipped_chunks_are_those_that_were_first(self):
        """Chunks 1 and 2 of the same parts: nothing is new, and the values are the same as
        before.
        """
        other = self.path.with_name("other")
        done = run(
            *self.base, "--spread", 2, "--skip", 1, "--chunks", 2, "--values", other, code=OK
        )
        self.assertIn("4 of 4 chunks and configurations are done", done.stderr)
        _, tensors = read(other.read_bytes())
        for name, (shape, values) in tensors.items():
            self.assertEqual((shape, values), ([2, ROWS], self.tensors[name][1][ROWS:]))

    def test_chunks_of_the_first_part_are_those_that_follow_each_other(self):
        """Three chunks from the text's beginning on: the first and the second belong to the first
        part, the third is new.
        """
        done = run(*self.base, "--chunks", 3, code=OK)
        self.assertIn("4 of 6 chunks and configurations are done", done.stderr)

    def test_a_file_that_cannot_be_written(self):
        words = ["--spread", 2, "--chunks", 3, "--values", "/nonexistent/values"]
        done = run(*self.base, *words, code=RUNTIME)
        self.assertIn("/nonexistent/values", done.stderr)
        self.assertEqual(json.loads(done.stdout), self.rows)


if __name__ == "__main__":
    unittest.main()
