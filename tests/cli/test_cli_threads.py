"""How many threads a command takes when -t does not say it: as many as there are idle CPUs."""

import contextlib
import os
import subprocess
import sys
import unittest

import testing
from testing import SMALL, run

testing.OF_A_MODEL = ()  # no -t 1 for these commands
ARGUMENTS = ["run", "-m", SMALL, "-p", "a", "-n", "3", "-k", "int-8"]
SPIN = "while True: pass"


@contextlib.contextmanager
def busy_cpus(cpus):
    """Starts a program for each of these CPUs that keeps the CPU busy."""
    programs = []
    try:
        for cpu in cpus:
            programs.append(subprocess.Popen([sys.executable, "-c", SPIN]))
            os.sched_setaffinity(programs[-1].pid, {cpu})
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


class Threads(unittest.TestCase):
    def setUp(self):
        self.cpus = sorted(os.sched_getaffinity(0))
        if len(self.cpus) < 2:
            self.skipTest("needs two CPUs")

    def test_busy_cpus_get_no_thread(self):
        with busy_cpus(self.cpus):
            done = run(*ARGUMENTS)
        self.assertEqual(done.returncode, 0, done.stderr)
        said = f"1 thread instead of {len(self.cpus)}, because other programs keep CPUs busy"
        self.assertIn(said, done.stderr)

    def test_threads_that_were_asked_for_are_taken(self):
        with busy_cpus(self.cpus[1:]):
            done = run(*ARGUMENTS, "-t", "2")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("keep CPUs busy", done.stderr)

    def test_one_cpu_is_not_watched(self):
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cpus[:1])
        try:
            with busy_cpus(self.cpus[:1]):
                done = run(*ARGUMENTS)
        finally:
            os.sched_setaffinity(0, allowed)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("keep CPUs busy", done.stderr)


if __name__ == "__main__":
    unittest.main()
