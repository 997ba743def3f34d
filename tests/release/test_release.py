"""scripts/release.py says why a commit cannot be released, and writes all files or none.

A small Makefile replaces kvant's own, whose binaries take minutes (test_whole.py builds them).
"""

import os
import pathlib
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest

import tree  # finds the modules of scripts

import release
import version

NUMBER = version.of(tree.ROOT)
FILES = release.names(NUMBER)
MAKEFILE = "".join(
    f"{target}:\n\tmkdir -p build/$@ && echo $$SOURCE_DATE_EPOCH >build/$@/{FILES[target]}\n"
    for target in ("dist", "wheel")
)
CHANGES = f"""## Unreleased

## {NUMBER} - 2026-01-31

The [summary](docs/troubleshooting.md) of [this](https://localhost/).

### Added

- Much.

### Known limits

- Few.

## 0.0.1 - 2025-01-01

- Older.
"""


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def commit(self, name="clone", **texts):
        texts = {"CHANGELOG.md": CHANGES, "Makefile": MAKEFILE} | texts
        return tree.commit(self.folder / name, **texts)

    def release(self, clone, *words, **more):
        return subprocess.run(
            [sys.executable, clone / "scripts" / "release.py", *words],
            env=tree.ENVIRONMENT | {"PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            **more,
        )


class Refusals(Case):
    """Each is one line that says what to do, and nothing is written."""

    def refused(self, clone, *words):
        out = self.folder / "out"
        for done in (self.release(clone, "--check"), self.release(clone, out)):
            self.assertEqual(done.returncode, 1, done.stdout)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
            for word in words:
                self.assertIn(word, done.stderr)
            self.assertRegex(done.stderr, r"^release: .*: \w")
        self.assertEqual([path.name for path in self.folder.iterdir()], [clone.name])

    def test_accepted(self):
        done = self.release(self.commit(), "--check")
        self.assertEqual((done.stdout, done.stderr), (f"{NUMBER} can be released\n", ""))

    def test_changed_file(self):
        clone = self.commit()
        (clone / "CITATION.cff").write_text("changed")
        self.refused(clone, "1 files differ from the commit (CITATION.cff): commit them")

    def test_untracked_file(self):
        clone = self.commit()
        (clone / "new.c").write_text("")
        self.refused(clone, "(new.c)")

    def test_staged_file(self):
        clone = self.commit()
        (clone / "new.c").write_text("")
        tree.git(clone, "add", "new.c")
        self.refused(clone, "(new.c)")

    def test_no_checkout(self):
        clone = self.commit()
        (clone / ".git").rename(clone / "gone")
        self.refused(clone, "run this in a clone")

    def test_folder_in_another_checkout(self):
        outer = tree.commit(self.folder / "outer", **{"CHANGELOG.md": CHANGES})
        inner = tree.commit(outer / "inner")
        (inner / ".git").rename(inner / "gone")
        done = self.release(inner, "--check")
        self.assertEqual(done.returncode, 1)
        self.assertIn("is not a git checkout: run this in a clone", done.stderr)

    def test_versions_differ(self):
        citation = (tree.ROOT / "CITATION.cff").read_text().replace(NUMBER, "87.0.0")
        clone = self.commit(**{"CITATION.cff": citation})
        self.refused(clone, "CITATION.cff has 87.0.0", "run scripts/version.py --write")

    def test_no_section(self):
        text = CHANGES.replace(f"## {NUMBER} -", "## 87.0.0 -")
        self.refused(
            self.commit(**{"CHANGELOG.md": text}), f"no section of {NUMBER}: write one, headed"
        )

    def test_section_without_date(self):
        text = CHANGES.replace(" - 2026-01-31", ", not released")
        self.refused(self.commit(**{"CHANGELOG.md": text}), "YEAR-MONTH-DAY")

    def test_unreleased_changes(self):
        text = CHANGES.replace("## Unreleased\n", "## Unreleased\n\n- A change.\n")
        self.refused(self.commit(**{"CHANGELOG.md": text}), "changes under Unreleased: move them")

    def test_no_summary(self):
        text = re.sub(r"The \[summary.*\n", "", CHANGES)
        self.refused(self.commit(**{"CHANGELOG.md": text}), "needs a summary")

    def test_notes_above_a_page(self):
        text = CHANGES.replace("- Few.\n", "- One.\n" * release.PAGE)
        self.refused(
            self.commit(**{"CHANGELOG.md": text}), f"lines of {release.PAGE}: shorten the summary"
        )

    def test_tag_of_another_version(self):
        clone = self.commit()
        tree.git(clone, "tag", "v87.0.0")
        self.refused(clone, "has the tag v87.0.0", "change the version in CMakeLists.txt")

    def test_tag_at_another_commit(self):
        clone = self.commit()
        tree.git(clone, "tag", f"v{NUMBER}")
        done = self.release(clone, "--check")
        self.assertEqual(done.returncode, 0, done.stderr)
        tree.git(clone, "commit", "--quiet", "--allow-empty", "-m", "more")
        self.refused(clone, f"the tag v{NUMBER} is at another commit: raise the version")

    def test_folder_that_is_no_release(self):
        clone = self.commit()
        (self.folder / "mine").mkdir()
        (self.folder / "mine" / "letter").write_text("dear")
        done = self.release(clone, self.folder / "mine")
        self.assertIn("is not a release: name another folder", done.stderr)
        self.assertEqual((self.folder / "mine" / "letter").read_text(), "dear")


class Files(Case):
    def test_a_release(self):
        clone = self.commit()
        out = clone.parent / "build" / "release"
        done = self.release(clone, out)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(
            {path.name for path in out.iterdir()},
            {*FILES.values(), "SHA256SUMS", "RELEASE_NOTES.md"},
        )
        self.assertEqual([path.name for path in out.parent.iterdir()], ["release"])
        subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=out, check=True)
        listed = (out / "SHA256SUMS").read_text().split()[1::2]
        self.assertEqual(sorted(listed), sorted(FILES.values()))
        self.assertEqual((out / FILES["wheel"]).read_text(), "1700000000\n")  # the commit's time
        self.assertIn(f"git tag -s v{NUMBER} ", done.stdout)
        self.assertIn(f"gh release create v{NUMBER} ", done.stdout)
        # A second release takes the place of the first.
        (out / FILES["wheel"]).write_text("old")
        self.assertEqual(self.release(clone, out).returncode, 0)
        self.assertEqual((out / FILES["wheel"]).read_text(), "1700000000\n")
        self.assertEqual([path.name for path in out.parent.iterdir()], ["release"])

    def test_notes(self):
        text = release.notes(CHANGES, NUMBER)
        self.assertIn(f"# kvant {NUMBER}\n", text)
        self.assertIn("The summary (docs/troubleshooting.md) of [this](https://localhost/).", text)
        self.assertIn("- Few.", text)
        for word in ("Much", "Older", "Added"):
            self.assertNotIn(word, text)
        for name in FILES.values():
            self.assertIn(name, text)

    def test_notes_of_this_tree(self):
        """The changelog has a section of the version, and its notes fit a page. Changes after the
        release are under Unreleased.
        """
        changes = (tree.ROOT / "CHANGELOG.md").read_text()
        changes = re.sub(r"(?s)^(## Unreleased\n).*?(?=^## )", r"\1", changes, flags=re.MULTILINE)
        self.assertIn(NUMBER, release.notes(changes, NUMBER))

    def test_the_source_of_a_commit_has_one_form(self):
        """The same bytes from another folder, at another time, with other rights."""
        made = []
        for mask, name in ((0o022, "a"), (0o077, "b")):
            old = os.umask(mask)
            self.addCleanup(os.umask, old)
            clone = self.commit(name)
            tree.git(clone, "config", "tar.umask", "user")
            os.utime(clone / "CITATION.cff", (1, mask))
            release.source_tarball(clone, NUMBER, clone / "source")
            made.append((clone / "source").read_bytes())
        self.assertEqual(*made)

    @unittest.skipUnless((tree.ROOT / ".git").exists(), "not a checkout: files are not known")
    def test_the_source_configures(self):
        clone = tree.commit(self.folder / "clone", tree=tree.tracked())
        release.source_tarball(clone, NUMBER, self.folder / "source.tar.gz")
        with tarfile.open(self.folder / "source.tar.gz") as tar:
            names = {name.partition("/")[2] for name in tar.getnames() if "/" in name}
            tar.extractall(self.folder)
        self.assertLessEqual(set(tree.tracked()), names)
        source = self.folder / f"kvant-{NUMBER}"
        done = subprocess.run(
            ["cmake", "-S", source, "-B", self.folder / "build", "-DKVANT_CUDA=OFF"],
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        cached = (self.folder / "build" / "CMakeCache.txt").read_text()
        self.assertIn(f"CMAKE_PROJECT_VERSION:STATIC={NUMBER}\n", cached)


def runs(pid):
    """Whether a process exists and has not ended; one that has may wait for its parent."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


class Halves(Case):
    """A release that fails or is interrupted changes nothing."""

    def unchanged(self, out):
        self.assertEqual([path.name for path in out.parent.iterdir()], ["release"])
        self.assertEqual([path.name for path in out.iterdir()], ["SHA256SUMS"])
        self.assertEqual((out / "SHA256SUMS").read_text(), "of the release before")

    def before(self, makefile):
        clone = self.commit(Makefile=makefile)
        out = self.folder / "build" / "release"
        out.mkdir(parents=True)
        (out / "SHA256SUMS").write_text("of the release before")
        return clone, out

    def test_a_make_that_fails(self):
        clone, out = self.before(MAKEFILE + "\t@echo it broke && false\n")
        done = self.release(clone, out)
        self.assertEqual(done.returncode, 1)
        self.assertIn("it broke\n", done.stderr)
        self.assertRegex(done.stderr, r"release: `make .*` failed: ")
        self.unchanged(out)

    def test_a_make_without_its_file(self):
        clone, out = self.before(MAKEFILE.replace("manylinux", "other"))
        done = self.release(clone, out)
        self.assertIn(f"make wheel made no {FILES['wheel']}", done.stderr)
        self.unchanged(out)

    def test_interrupted(self):
        for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with self.subTest(sent=sent.name):
                self.folder = self.folder / sent.name
                pid = self.folder.parent / "pid"
                # The program that make runs ignores Ctrl-C, as a wrapper script might.
                clone, out = self.before(
                    f"dist wheel:\n\ttrap '' INT; echo $$$$ >{pid}.new; mv {pid}.new {pid}; "
                    "while true; do date >half; sleep 0.01; done\n"
                )
                with subprocess.Popen(
                    [sys.executable, clone / "scripts" / "release.py", out],
                    stderr=subprocess.PIPE,
                    text=True,
                    env=tree.ENVIRONMENT | {"PYTHONDONTWRITEBYTECODE": "1"},
                    # A test in the background ignores SIGINT, and its children would, too.
                    preexec_fn=lambda: signal.signal(sent, signal.SIG_DFL),
                ) as process:
                    deadline = time.monotonic() + 30
                    while not pid.exists() and time.monotonic() < deadline:
                        time.sleep(0.01)
                    process.send_signal(sent)
                    _, said = process.communicate(timeout=30)
                self.assertEqual(process.returncode, 1)
                self.assertIn("nothing was written", said)
                self.unchanged(out)
                self.assertFalse(runs(pid.read_text().strip()))
                pid.unlink()


if __name__ == "__main__":
    unittest.main()
