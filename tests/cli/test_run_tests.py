"""scripts/run_tests.py: it lists skipped tests and skipped parts of tests by name, and failures
decide its exit code.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"

PROJECT = """cmake_minimum_required(VERSION 3.22)
project(tests NONE)
enable_testing()
add_test(NAME good COMMAND ${CMAKE_COMMAND} -E echo "all good")
add_test(NAME gpu COMMAND ${CMAKE_COMMAND} -E echo "skipped: no CUDA device")
set_tests_properties(gpu PROPERTIES SKIP_REGULAR_EXPRESSION "skipped: ")
add_test(NAME levels COMMAND ${CMAKE_COMMAND} -E cat ${CMAKE_CURRENT_SOURCE_DIR}/levels)
add_test(NAME levels2 COMMAND ${CMAKE_COMMAND} -E cat ${CMAKE_CURRENT_SOURCE_DIR}/levels)
add_test(NAME cases COMMAND python3 -B ${CMAKE_CURRENT_SOURCE_DIR}/cases.py -v)
if(BAD)
    add_test(NAME bad COMMAND ${CMAKE_COMMAND} -E false)
endif()
if(SPIN)
    add_test(NAME spin COMMAND ${CMAKE_COMMAND} -E environment)
    set_tests_properties(spin PROPERTIES PASS_REGULAR_EXPRESSION "GOMP_SPINCOUNT=${SPIN}[^0-9]")
endif()
"""

CASES = '''import unittest


class Cases(unittest.TestCase):
    @unittest.skip("nobody mounts here")
    def test_mount(self):
        """A docstring takes a line."""

    @unittest.skipIf(True, "no 'disk' either")
    def test_disk(self):
        pass

    def test_that_runs(self):
        pass


unittest.main()
'''


class RunTests(unittest.TestCase):
    def run_tests(self, *options, **environment):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        root = pathlib.Path(folder.name)
        (root / "CMakeLists.txt").write_text(PROJECT)
        (root / "levels").write_text("x" * 5000 + "\n[ RUN      ] one\nskipped: CPU level avx9\n")
        (root / "cases.py").write_text(CASES)
        subprocess.run(
            ["cmake", "-S", root, "-B", root / "build", *options], check=True, capture_output=True
        )
        return subprocess.run(
            [sys.executable, "-B", SCRIPTS / "run_tests.py", root / "build", "-j", "2"],
            capture_output=True,
            text=True,
            env={name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
            | environment,
        )

    def test_openmp_threads_spin_briefly(self):
        self.assertEqual(self.run_tests("-DSPIN=5000").returncode, 0)
        self.assertEqual(self.run_tests("-DSPIN=7", GOMP_SPINCOUNT="7").returncode, 0)

    def test_what_was_skipped_is_listed(self):
        done = self.run_tests()
        self.assertEqual(done.returncode, 0, done.stdout)
        said = done.stdout[done.stdout.index("Not tested on this machine:") :].splitlines()
        self.assertEqual(
            said,
            [
                "Not tested on this machine:",
                "  gpu: no CUDA device",
                "  CPU level avx9 (levels, levels2)",
                "  test_disk: no 'disk' either (cases)",
                "  test_mount: nobody mounts here (cases)",
                "",
                "4 passed, 0 failed, 1 skipped",
            ],
        )

    def test_failures_are_listed_and_fail(self):
        done = self.run_tests("-DBAD=ON")
        self.assertNotEqual(done.returncode, 0)
        self.assertTrue(
            done.stdout.endswith("Failed:\n  bad\n\n4 passed, 1 failed, 1 skipped\n"), done.stdout
        )

    def test_a_folder_without_tests(self):
        done = subprocess.run(
            [sys.executable, "-B", SCRIPTS / "run_tests.py", "/nonexistent"],
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 2)
        self.assertIn("usage", done.stderr)


if __name__ == "__main__":
    unittest.main()
