"""Each test of CTest that names cases of a program (cases.h) finds some. cmocka runs no case, and
reports success, where the name is wrong.
"""

import fnmatch
import json
import os
import pathlib
import re
import subprocess
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = os.environ.get("KVANT_BUILD", "")


def sources():
    """{program: source} of programs whose arguments choose cases."""
    texts = {path.stem: path.read_text() for path in ROOT.glob("tests/**/test_*.c")}
    return {
        name: text
        for name, text in texts.items()
        if re.search(r"^RUN_CASES|choose_cases\(", text, re.M)
    }


def has_case(source, pattern):
    cases = re.findall(r"^CASE\w*\((\w+)|\bvoid (\w+)\(void \*\*", source, re.M)
    names = [name for pair in cases for name in pair if name]
    return any(fnmatch.fnmatch(name, pattern.removeprefix("-")) for name in names)


@unittest.skipUnless(BUILD, "needs a build's folder: KVANT_BUILD")
class Cases(unittest.TestCase):
    def test_names_of_cases(self):
        words = ["ctest", "--test-dir", BUILD, "--show-only=json-v1"]
        told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        known, wrong = sources(), []
        for test in json.loads(told)["tests"]:
            command = test.get("command", [""])
            source = known.get(pathlib.Path(command[0]).name)
            if source is not None and len(command) > 1 and not has_case(source, command[1]):
                wrong.append(f"{test['name']}: {command[1]}")
        self.assertEqual(wrong, [])

    def test_a_wrong_name_is_found(self):
        source = "CASE(a_case)\n{\n}\nstatic void of_a_list(void **state)\n{\n}\n"
        self.assertTrue(has_case(source, "a_*"))
        self.assertTrue(has_case(source, "-a_case"))
        self.assertTrue(has_case(source, "of_*"))
        self.assertFalse(has_case(source, "another_case"))


if __name__ == "__main__":
    unittest.main()
