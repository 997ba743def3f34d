"""Texts that are made from the option tables: the man page, the reference and the completions agree
with the program and are complete.
"""

import json
import pathlib
import shutil
import subprocess
import sys
import unittest

from testing import KVANT, run

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMPLETION = ROOT / "share" / "completion"
OK, USAGE = 0, 2


class Files(unittest.TestCase):
    def test_they_are_what_the_tables_say(self):
        done = subprocess.run(
            [sys.executable, ROOT / "scripts" / "reference.py", "--kvant", KVANT, "--check"],
            capture_output=True,
            text=True,
        )
        self.assertEqual(
            (done.returncode, done.stdout, done.stderr),
            (OK, "", ""),
            "run scripts/reference.py and commit what it writes",
        )

    def test_fields_are_described(self):
        page = (ROOT / "docs" / "kvant.1").read_text().partition(".SS kvant codecs")[2]
        for field in json.loads(run("codecs", "--json").stdout)[0]:
            self.assertIn(f"\\fB{field}\\fR", page)

    def test_each_synopsis_has_a_line(self):
        """kvant search has four commands, and each begins a line of the synopsis."""
        page = (ROOT / "docs" / "kvant.1").read_text()
        synopsis = page.partition(".SH SYNOPSIS\n")[2].partition("\n.SH ")[0]
        lines = [line for line in synopsis.splitlines() if line != ".br"]
        self.assertEqual([line for line in lines if line.count("kvant ") != 1], [])
        search = [line.split()[2] for line in lines if line.startswith(r"\fBkvant search\fR")]
        self.assertEqual(search, ["build", "query", "info", "eval"])

    def test_the_man_page_has_no_warnings(self):
        if shutil.which("groff") is None:
            self.skipTest("no groff")
        done = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww", "-rLL=100n", ROOT / "docs" / "kvant.1"],
            capture_output=True,
            text=True,
        )
        self.assertEqual(
            (
                done.returncode,
                [
                    line
                    for line in done.stderr.splitlines()
                    if "adjust" not in line and "break" not in line
                ],
            ),
            (OK, []),
        )
        self.assertIn("MODEL.gguf" if "MODEL.gguf" in done.stdout else "model.gguf", done.stdout)


class Shells(unittest.TestCase):
    def completed(self, *words):
        """The words that bash offers for the last word."""
        script = (
            f'source {COMPLETION / "kvant.bash"}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
            "COMPREPLY=(); _kvant; "
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "-c", script, "bash", *words], capture_output=True, text=True
        )
        self.assertEqual((done.returncode, done.stderr), (OK, ""))
        return done.stdout.split()

    def test_commands(self):
        self.assertEqual(self.completed("kvant", "ca"), ["calibrate", "capture"])
        self.assertEqual(self.completed("kvant", "--ver"), ["--version"])
        self.assertEqual(self.completed("kvant", "--cpu", "neon"), ["neon", "neondot"])
        self.assertEqual(self.completed("kvant", "--cpu", "c", "tu"), ["tune"])
        self.assertEqual(self.completed("kvant", "help", "ev"), ["eval"])
        self.assertEqual(self.completed("kvant", "bench", "d"), ["distortion"])
        self.assertEqual(self.completed("kvant", "completion", ""), ["bash", "zsh", "fish"])

    def test_options_and_values(self):
        self.assertEqual(self.completed("kvant", "run", "--top"), ["--top-k", "--top-p"])
        self.assertEqual(self.completed("kvant", "bench", "model", "--dep"), ["--depth"])
        self.assertEqual(
            self.completed("kvant", "exec", "--preset", ""),
            ["quality", "balanced", "small", "tiny"],
        )
        self.assertEqual(
            self.completed("kvant", "eval", "-m", "x", "--stock", "q4"), ["q4_1", "q4_0"]
        )
        self.assertEqual(
            self.completed("kvant", "eval", "-k", "trellis-"),
            ["trellis-2", "trellis-3", "trellis-4"],
        )
        self.assertEqual(self.completed("kvant", "report", "--long"), ["--longest"])
        self.assertEqual(self.completed("kvant", "eval", "-c", ""), [])
        self.assertEqual(self.completed("kvant", "exec", "--", "--pre"), [])

    def test_other_shells_read_their_scripts(self):
        for shell, file in (("zsh", "_kvant"), ("fish", "kvant.fish")):
            with self.subTest(shell=shell):
                if shutil.which(shell) is None:
                    self.skipTest(f"no {shell}")
                done = subprocess.run(
                    [shell, "-n", COMPLETION / file], capture_output=True, text=True
                )
                self.assertEqual((done.returncode, done.stderr), (OK, ""))

    def test_fish_completes(self):
        if shutil.which("fish") is None:
            self.skipTest("no fish")
        for line, words in (
            ("kvant ca", ["calibrate", "capture"]),
            ("kvant bench d", ["distortion"]),
            ("kvant run --top", ["--top-k", "--top-p"]),
            ("kvant exec --preset ", ["balanced", "quality", "small", "tiny"]),
            ("kvant eval -k trellis-", ["trellis-2", "trellis-3", "trellis-4"]),
        ):
            done = subprocess.run(
                ["fish", "-c", f"source {COMPLETION / 'kvant.fish'}; complete -C '{line}'"],
                capture_output=True,
                text=True,
            )
            self.assertEqual(
                [found.split()[0] for found in done.stdout.splitlines()], words, done.stderr
            )

    def test_the_command_prints_them(self):
        for shell, file in (("bash", "kvant.bash"), ("zsh", "_kvant"), ("fish", "kvant.fish")):
            done = run("completion", shell)
            self.assertEqual((done.returncode, done.stdout), (OK, (COMPLETION / file).read_text()))
        for words, said in ((["basch"], "did you mean 'bash'?"), ([], "no shell given")):
            done = run("completion", *words)
            self.assertEqual((done.returncode, done.stdout), (USAGE, ""))
            self.assertIn(said, done.stderr)


if __name__ == "__main__":
    unittest.main()
