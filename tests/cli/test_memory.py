"""kvant codecs when an allocation fails: it prints the whole list, or one line and an exit code,
but never a list with missing numbers.
"""

import os
import unittest

from testing import run

OK, RUNTIME = 0, 1
LIBRARY = os.environ["FAIL_MALLOC"]  # fail_malloc.c
SOME = [*range(1, 12), 20, 50, 120, 250, 400, 600]  # the command makes some 600 allocations


class Codecs(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.whole = {
            arguments: run("codecs", *arguments).stdout
            for arguments in ((), ("--all",), ("--json",))
        }

    def check(self, variable, n, *arguments):
        done = run("codecs", *arguments, LD_PRELOAD=LIBRARY, **{variable: str(n)})
        if done.returncode == OK:
            self.assertEqual((done.stdout, done.stderr), (self.whole[arguments], ""))
            return OK
        self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""))
        self.assertRegex(done.stderr, r"^kvant: .*memory.*\n$")
        return RUNTIME

    def test_one_allocation_fails(self):
        codes = [
            self.check("FAIL_AT", n, *arguments)
            for n in SOME
            for arguments in ((), ("--all",), ("--json",))
        ]
        self.assertGreater(codes.count(RUNTIME), len(SOME))

    def test_memory_ends(self):
        for n in SOME:
            self.check("FAIL_FROM", n, "--all")

    def test_no_allocation_fails(self):
        self.assertEqual(self.check("FAIL_AT", 10**6), OK)


if __name__ == "__main__":
    unittest.main()
