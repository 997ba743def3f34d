"""How the kvant command starts its commands that are written in Python: the programs that start
them, their arguments, and the messages if Python or the package is missing.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import unittest

from testing import KVANT, program, run, temporary_folder

OK, RUNTIME, USAGE = 0, 1, 2
PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "integrations" / "python"


class Door(unittest.TestCase):
    def setUp(self):
        self.folder = temporary_folder(self.addCleanup)

    def told(self, *arguments, **environment):
        """The words and the environment with which an interpreter would be started."""
        python = program(self.folder, "python", f'exec "{sys.executable}" -c "{self.TELL}" "$@"')
        done = run(*arguments, KVANT_PYTHON=str(python), **environment, code=OK)
        return json.loads(done.stdout)

    TELL = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"

    def test_words_and_environment(self):
        (package, *words), told = self.told("--cpu", "c", "report", "-o", "a b", "--json")
        self.assertEqual(words, ["report", "-o", "a b", "--json"])
        self.assertTrue(os.path.samefile(package, PACKAGE / "kvant" / "commands"))
        self.assertTrue(os.path.samefile(told["KVANT_COMMAND"], KVANT))
        self.assertTrue(os.path.samefile(pathlib.Path(told["KVANT_DATA"]) / "python", PACKAGE))
        self.assertEqual(told["KVANT_CPU"], "c")

    def test_a_library_that_was_chosen_stays(self):
        self.assertEqual(
            self.told("report", KVANT_LIBRARY="/nowhere/libkvant.so")[1]["KVANT_LIBRARY"],
            "/nowhere/libkvant.so",
        )

    def test_no_python(self):
        done = run("report", KVANT_PYTHON="/nonexistent/python")
        self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""))
        self.assertIn("cannot start /nonexistent/python: No such file", done.stderr)
        self.assertIn("KVANT_PYTHON names the interpreter", done.stderr)

    def test_old_python(self):
        old = (
            "import runpy, sys; sys.version_info = (3, 8, 1, 'final', 0); sys.argv = sys.argv[1:]; "
            "runpy.run_path(sys.argv[0], run_name='__main__')"
        )
        python = program(self.folder, "python", f'exec "{sys.executable}" -c "{old}" "$@"')
        done = run("report", "--help", KVANT_PYTHON=str(python))
        self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""))
        self.assertIn("report needs Python 3.9 or newer", done.stderr)

    def test_files_of_the_working_directory_are_not_run(self):
        (self.folder / "kvant" / "commands").mkdir(parents=True)
        for name in ("json.py", "typing.py", "kvant/__init__.py", "kvant/commands/report.py"):
            (self.folder / name).write_text("raise SystemExit('somebody else ran')")
        done = subprocess.run(
            [KVANT, "report", "--help"], cwd=self.folder, capture_output=True, text=True
        )
        self.assertEqual((done.returncode, done.stderr), (OK, ""))

    def install(self):
        (self.folder / "bin").mkdir()
        return shutil.copy(KVANT, self.folder / "bin")

    def test_a_moved_installation(self):
        """Without a plotting library the page has only tables, and the command says so."""
        moved = self.install()
        shutil.copytree(PACKAGE / "kvant", self.folder / "share" / "kvant" / "python" / "kvant")
        results = pathlib.Path(__file__).parent / "report_results.json"
        page = self.folder / "page.html"
        done = subprocess.run(
            [moved, "report", "--from", results, "-o", page], capture_output=True, text=True
        )
        self.assertEqual(done.returncode, OK, done.stderr)
        self.assertIn("the page has tables only", done.stderr)
        self.assertIn('"kvant_report":1', page.read_text())
        self.assertLess(page.stat().st_size, 100000)

    def test_no_package(self):
        done = subprocess.run([self.install(), "report", "--help"], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""))
        self.assertIn("the Python part of kvant is missing", done.stderr)

    def test_output_that_cannot_be_written(self):
        with open("/dev/full", "w") as full:
            done = run("report", "--help", stdout=full)
        self.assertEqual(done.returncode, RUNTIME)
        self.assertEqual(
            done.stderr, "kvant: cannot write to standard output: No space left on device\n"
        )

    def test_command_lines(self):
        for arguments, words in [
            (["--longst", "1"], ["unknown option --longst", "did you mean --longest?"]),
            (["--quicker"], ["unknown option --quicker", "did you mean --quick?"]),
            (["--c", "1"], ["report: --c is ambiguous: it may be --config or --codec-k"]),
            (["-x"], ["unknown option -x"]),
            (["-c"], ["-c needs a value"]),
            (["--ctx"], ["--ctx needs a value"]),
            (["--quick=1"], ["--quick takes no value"]),
            (["-c", "seven"], ["--ctx: 'seven' is not a whole number from 8 to 16777216"]),
            (["--long", "1"], ["--longest: '1' is not a whole number from 512"]),
            (["page.html"], ["unexpected word 'page.html'"]),
        ]:
            with self.subTest(arguments=arguments):
                done = run("report", *arguments)
                self.assertEqual((done.returncode, done.stdout), (USAGE, ""))
                for word in words:
                    self.assertIn(word, done.stderr)


if __name__ == "__main__":
    unittest.main()
