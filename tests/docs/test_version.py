"""Every place that names the version of kvant has the version of CMakeLists.txt, and
scripts/version.py knows every place.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import version

FILES = sorted({name for name, _, _ in version.PLACES})
SECTION = re.compile(r"^## (\d+\.\d+)\.\d+\b", re.MULTILINE)
# Measurements keep the version that was measured, the changelog names every release, and tests
# have texts of other versions.
HISTORY = ("bench/results/", "docs/evidence/", "docs/reports/", "CHANGELOG.md", "tests/")


def tracked():
    listed = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


class Version(unittest.TestCase):
    def test_places_agree(self):
        self.assertEqual(list(version.differences(ROOT)), [])

    @unittest.skipUnless((ROOT / ".git").exists(), "not a checkout: files are not known")
    def test_no_other_place(self):
        """A file that writes kvant and a version next to each other is one of the places."""
        named = [
            name
            for name in tracked()
            if not name.startswith(HISTORY)
            and re.search(
                r"\bkvant[ -]v?\d+\.\d+\.\d+\b", (ROOT / name).read_text(errors="replace")
            )
        ]
        self.assertLessEqual(set(named), set(FILES))
        self.assertTrue(named, "this check finds no version at all")

    def test_symbol_versions_are_releases(self):
        """Functions of libkvant.so have the version of a release, or of the next one."""
        nodes = re.findall(
            r"^KVANT_(\d+\.\d+) \{", (ROOT / "src" / "libkvant.map").read_text(), re.MULTILINE
        )
        releases = SECTION.findall((ROOT / "CHANGELOG.md").read_text())
        self.assertTrue(nodes)
        self.assertLessEqual(
            set(nodes), {*releases, version.of(ROOT).rpartition(".")[0]}, "CHANGELOG.md has no such"
        )

    def test_changes_have_a_release_before(self):
        """The first release has nothing that it changed, fixed or removed."""
        text = (ROOT / "CHANGELOG.md").read_text()
        first = re.split(r"^## \d", text, flags=re.MULTILINE)[-1]
        parts = set(re.findall(r"^### (.*)", first, re.MULTILINE))
        self.assertIn("Added", parts)
        self.assertFalse(parts & {"Changed", "Fixed", "Removed"})


class Places(unittest.TestCase):
    """A difference is found at each place, and --write mends it."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for name in (*FILES, "CMakeLists.txt", "pyproject.toml"):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)

    def change(self, name, pattern, replacement):
        path = self.root / name
        text, n = re.subn(pattern, replacement, path.read_text(), count=1, flags=re.MULTILINE)
        self.assertEqual(n, 1, f"{name} has no {pattern}")
        path.write_text(text)

    def test_each_place(self):
        for name, pattern, _ in version.PLACES:
            with self.subTest(name=name, pattern=pattern):
                whole = (self.root / name).read_text()
                self.change(name, pattern, r"\g<1>87\g<3>")
                (line,) = version.differences(self.root)
                self.assertIn(f"{name} has 87 where CMakeLists.txt says ", line)
                version.write(self.root)
                self.assertEqual((self.root / name).read_text(), whole)

    def test_new_version(self):
        self.change("CMakeLists.txt", version.PROJECT, "project(kvant VERSION 87.65.43 ")
        self.assertEqual(len(list(version.differences(self.root))), len(version.PLACES))
        version.write(self.root)
        self.assertEqual(list(version.differences(self.root)), [])
        header = (self.root / "include/kvant/kvant.h").read_text()
        self.assertIn("#define KVANT_VERSION_MINOR 65\n", header)
        self.assertIn('#define KVANT_VERSION_STRING "87.65.43"\n', header)

    def test_a_place_without_version(self):
        self.change("CITATION.cff", r"^version: .*\n", "")
        (line,) = version.differences(self.root)
        self.assertIn("CITATION.cff has no line that matches", line)

    def test_a_wheel_with_its_own_version(self):
        self.change("pyproject.toml", r"^regex = .*$", "regex = 'VERSION (?P<value>3[0-9.]+)'")
        (line,) = version.differences(self.root)
        self.assertIn("pyproject.toml does not read the version", line)

    def test_no_version(self):
        self.change("CMakeLists.txt", version.PROJECT, "project(kvant ")
        with self.assertRaisesRegex(version.Wrong, "write one"):
            version.of(self.root)


if __name__ == "__main__":
    unittest.main()
