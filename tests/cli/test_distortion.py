"""kvant bench distortion: its output, and that its verdicts follow from its numbers."""

import json
import pathlib
import signal
import subprocess
import tempfile
import unittest

from testing import KVANT, PAPERS, run

OK, RUNTIME, USAGE, INTERRUPTED = 0, 1, 2, 130
TABLES = [
    "octopus-1",
    "octopus-4",
    "octopus-5",
    "octopus-6",
    "octopus-7",
    "needle",
    "turboquant",
    "derived",
    "trellis",
    "size",
    "covering",
]


def cells(*arguments):
    done = run("bench", "distortion", "--quick", "--json", *arguments)
    return done.returncode, json.loads(done.stdout)


class Usage(unittest.TestCase):
    def test_help(self):
        for arguments in (["bench", "--help"], ["help", "bench"]):
            done = run(*arguments)
            self.assertEqual((done.returncode, done.stderr), (OK, ""))
            self.assertIn("\n  distortion ", done.stdout)
        done = run("bench", "distortion", "--help")
        self.assertEqual((done.returncode, done.stderr), (OK, ""))
        self.assertIn("Exit status", done.stdout)
        for table in TABLES:
            self.assertIn(table, done.stdout)

    def test_no_benchmark_and_an_unknown_one(self):
        done = run("bench")
        self.assertEqual((done.returncode, done.stdout), (USAGE, ""))
        self.assertIn("no benchmark given", done.stderr)
        done = run("bench", "distortions")
        self.assertEqual((done.returncode, done.stdout), (USAGE, ""))
        self.assertIn("did you mean 'distortion'?", done.stderr)

    def test_unknown_table(self):
        done = run("bench", "distortion", "--table", "octopus-2")
        self.assertEqual((done.returncode, done.stdout), (USAGE, ""))
        self.assertIn("no table 'octopus-2'", done.stderr)
        self.assertIn("did you mean 'octopus-", done.stderr)

    def test_surplus_word(self):
        self.assertEqual(run("bench", "distortion", "needle").returncode, USAGE)

    def test_unwritable_output_fails(self):
        with open("/dev/full", "w") as full:
            done = run("bench", "distortion", "--table", "size", stdout=full)
        self.assertEqual(done.returncode, RUNTIME)
        self.assertIn("cannot write to standard output", done.stderr)

    def test_without_numpy(self):
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "numpy.py").write_text("raise ImportError('none here')\n")
            done = run("bench", "distortion", "-t", "size", PYTHONPATH=folder)
            self.assertEqual(run("bench", "distortion", "--help", PYTHONPATH=folder).returncode, OK)
        self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""))
        self.assertIn("no NumPy", done.stderr)
        self.assertIn(
            "hint: apt install python3-numpy, or python3 -m pip install numpy", done.stderr
        )

    def test_interrupted_prints_what_is_complete(self):
        """Sizes need no random numbers, so they are printed before the first of all remaining
        cells.
        """
        command = [KVANT, "bench", "distortion", "-t", "size", "-t", "octopus-4", "--json"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as child:
            child.stderr.readline()  # the first event: the work has begun, and Ctrl-C is caught
            child.send_signal(signal.SIGINT)
            stdout, _ = child.communicate(timeout=60)
        self.assertEqual(child.returncode, INTERRUPTED)
        self.assertLess(len(json.loads(stdout)), 24 + 46)


class Codecs(unittest.TestCase):
    def test_errors_of_any_codec(self):
        done = run(
            *"bench distortion --quick --json -k turboquant-4:scale=norm -k trellis-4".split(),
            code=OK,
        )
        scalar, trellis = json.loads(done.stdout)
        self.assertEqual((scalar["spec"], scalar["bits"]), ("turboquant-4:scale=norm", 4.125))
        # Lloyd-Max's error at 4 bits
        self.assertAlmostEqual(scalar["relative"], 0.0095, delta=0.0004)
        self.assertLess(trellis["relative"], 0.6 * scalar["relative"])
        self.assertLessEqual(trellis["rescaled"], trellis["relative"])

    def test_one_that_does_not_exist(self):
        done = run("bench", "distortion", "--quick", "--json", "-k", "int-4", "-k", "int-44")
        good, bad = json.loads(done.stdout)
        self.assertEqual((done.returncode, good["note"]), (RUNTIME, None))
        self.assertIsNone(bad["relative"])
        self.assertTrue(bad["note"])

    def test_not_beside_tables(self):
        done = run("bench", "distortion", "-k", "int-4", "-t", "size")
        self.assertEqual((done.returncode, done.stdout), (USAGE, ""))
        self.assertIn("--table and -k", done.stderr)


class Cells(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.code, cls.cells = cells()
        # Without the papers' families, their cells name the codec that is missing.
        cls.measured = [c for c in cls.cells if PAPERS or c["measured"] is not None]

    def test_every_table_is_there_in_flat_objects(self):
        self.assertEqual(list(dict.fromkeys(cell["table"] for cell in self.cells)), TABLES)
        for cell in self.cells:
            wanted = {"table", "row", "column", "source", "paper", "measured", "error", "within"}
            self.assertLessEqual(wanted, set(cell))
            for value in cell.values():
                self.assertNotIsInstance(value, (dict, list))
            self.assertIsInstance(cell["paper"], (int, float))
            self.assertIsInstance(cell["within"], bool)

    def test_what_no_paper_prints_has_no_source(self):
        of_papers = [cell for cell in self.cells if cell["source"]]
        self.assertEqual((len(of_papers), len(self.cells)), (264, 295))
        for cell in self.cells:
            if cell["table"] in ("derived", "trellis"):
                self.assertIsNone(cell["source"], cell)
            elif cell["table"] != "size":
                self.assertTrue(cell["source"], cell)

    def test_verdicts_follow_from_the_numbers(self):
        for cell in self.cells:
            if cell["measured"] is None:
                self.assertFalse(cell["within"], cell)
                self.assertTrue(cell["note"], cell)
                continue
            far = abs(cell["measured"] - cell["paper"])
            if cell["column"] == "above f32 - 0.001":
                self.assertEqual(
                    cell["within"], cell["measured"] >= cell["paper"] - 3 * cell["error"]
                )
            elif cell["column"] == "mse >= bound":
                self.assertTrue(cell["within"], cell)
                self.assertGreater(cell["measured"], cell["paper"])
            elif "<=" in cell["column"]:  # bounds and aims
                self.assertEqual(
                    cell["within"], cell["measured"] <= cell["paper"] + 3 * cell["error"]
                )
            elif far < max(0.0199 * abs(cell["paper"]), 2.99 * cell["error"]):
                self.assertTrue(cell["within"], cell)
            elif far > 0.1 * abs(cell["paper"]) + 3.01 * cell["error"] and cell["paper"] not in (
                0.03,
                0.009,
            ):
                self.assertFalse(cell["within"], cell)

    def test_exit_code_counts_cells_without_a_footnote_and_missing_codecs(self):
        bad = [c for c in self.cells if not c["within"] and c["expected"] is None]
        self.assertEqual(self.code, RUNTIME if bad else OK, bad)

    def test_a_footnote_needs_a_figure_that_is_met(self):
        for cell in self.cells:
            if cell["expected"] is not None:
                self.assertFalse(cell["within"], cell)
                self.assertTrue(cell["note"], cell)
                far = abs(cell["measured"] - cell["expected"])
                self.assertLess(far, 0.02 * abs(cell["expected"]) + 3 * cell["error"] + 0.005, cell)

    def test_every_figure_is_met(self):
        outside = [c for c in self.measured if not c["within"] and c["expected"] is None]
        self.assertEqual((self.code, outside), (OK if PAPERS else RUNTIME, []))

    def test_turboquant_is_within(self):
        for cell in self.measured:
            if cell["table"] in ("octopus-7", "size"):  # bytes of metadata
                continue
            if cell["table"] == "turboquant" or "TurboQuant" in cell["row"]:
                self.assertTrue(
                    cell["within"] or (cell["paper"], cell["expected"]) == (0.047, 0.0534), cell
                )

    def test_the_same_numbers_every_time(self):
        self.assertEqual(
            cells("-t", "derived")[1], [c for c in self.cells if c["table"] == "derived"]
        )

    def test_table_for_people_has_the_same_cells(self):
        done = run("bench", "distortion", "--quick", "-t", "needle", "-t", "size")
        lines = done.stdout.split("\n\n")[0].splitlines()[1:]
        self.assertEqual(
            [line.split()[0] for line in lines],
            [c["table"] for c in self.cells if c["table"] in ("needle", "size")],
        )


if __name__ == "__main__":
    unittest.main()
