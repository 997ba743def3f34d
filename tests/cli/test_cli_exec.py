"""kvant exec without a model: variables, options and words before the program that mislead."""

import sys
import unittest

from testing import PLUGIN, run

OK, USAGE = 0, 2


@unittest.skipUnless(PLUGIN, "the plug-in is not built")
class Variables(unittest.TestCase):
    def test_what_chose_wrongly_is_named(self):
        """A variable where it was the variable, the option where it was the option."""
        for option, variable, value in (("--preset", "KVANT_PRESET", "huge"), ("--calibration", "KVANT_CALIBRATION", "/no/where"),
                                        ("--config", "KVANT_CONFIG", "/no/where"), ("-k", "KVANT_K", "nonsense"),
                                        ("-v", "KVANT_V", "nonsense"), ("--protect-codec", "KVANT_PROTECT_CODEC", "nonsense")):
            for options, environment, named, other in (([], {variable: value}, variable, f"{option} "),
                                                       ([option, value], {}, option, variable)):
                done = run("exec", *options, "--", sys.executable, **environment)
                self.assertEqual((done.returncode, done.stdout), (USAGE, ""), (option, options))
                first = done.stderr.splitlines()[0]
                self.assertTrue(first.startswith(f"kvant: {named}"), first)
                self.assertNotIn(other, first)
        done = run("exec", "--", sys.executable, KVANT_CONFIG="x", KVANT_PROTECT="1")
        self.assertIn("exec: KVANT_CONFIG=x says", done.stderr)


if __name__ == "__main__":
    unittest.main()
