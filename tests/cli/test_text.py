"""Texts as input of commands. A text that no tokenizer accepts is refused with its name and the
offset. The text kvant:manual never changes.
"""

import hashlib
import pathlib
import unittest

from testing import KVANT, SMALL, SRC, run, temporary_folder

OK, RUNTIME = 0, 1
MANUAL = pathlib.Path(__file__).resolve().parents[2] / "share" / "manual.txt"
# The first and the last numbers beyond U+10FFFF that four bytes can hold, and a longer text with
# such a number at byte 6.
BEYOND = [b"\xf4\x90\x80\x80", b"\xf7\xbf\xbf\xbf", b"before\xf5\x80\x80\x80after " * 3]
# These bytes are malformed as well, but llama.cpp replaces them.
TAKEN = [
    b"\xf4\x8f\xbf\xbf",
    b"\xf4\x90\x80",
    b"\xf5\x80",
    b"\xed\xa0\x80",
    b"\xc0\x80",
    b"\xff\xfe\x80",
    b"caf\xe9",
]


class Manual(unittest.TestCase):
    """Results on this text are compared with older ones, so a change must be intended. Whoever
    changes the text changes the sum here, too.
    """

    @unittest.skipUnless(SRC, "built without llama.cpp's headers")
    def test_it_is_frozen(self):
        text = MANUAL.read_bytes()
        self.assertEqual(
            hashlib.sha256(text).hexdigest(),
            "22ed91fb02da67bc4b84b415d3dc4652071199b175777deadf9e9a6daa883afe",
        )
        self.assertIn(text, pathlib.Path(KVANT).read_bytes())


@unittest.skipUnless(SMALL, "no model")
class BeyondUnicode(unittest.TestCase):
    def setUp(self):
        self.folder = temporary_folder(self.addCleanup)
        self.text = self.folder / "text.txt"
        self.out = self.folder / "out"

    def refused(self, done, name, offset, said):
        self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""), done.stderr)
        lines = [line for line in done.stderr.splitlines() if line.startswith("kvant: ")]
        self.assertEqual(len(lines), 1, done.stderr)
        for word in (str(name), f"byte {offset} ", "U+10FFFF", said):
            self.assertIn(word, lines[0])

    def test_every_command_with_a_text(self):
        self.text.write_bytes(b"An ordinary beginning.\n" * 200 + b"\xf4\x90\x80\x80")
        text, offset = self.text, 200 * 23
        for arguments in (
            ["eval", "-f", text, "-c", 64],
            ["needle", "-f", text, "-c", 256],
            ["run", "-f", text],
            ["calibrate", "-f", text, "-o", self.out],
            ["capture", "-f", text, "-o", self.out],
            ["report", "-f", text, "-o", self.out, "-c", 64],
            ["tune", "-f", text, "-o", self.out, "--bits", 4],
            ["tune", "-f", "kvant:manual", "--report-text", text, "-o", self.out, "--bits", 4],
        ):
            with self.subTest(arguments=arguments):
                self.refused(run(*arguments, "-m", SMALL), text, offset, "f4 90 80 80")
                self.assertEqual([path.name for path in self.folder.iterdir()], ["text.txt"])

    def test_prompts_and_standard_input(self):
        for text in BEYOND:
            offset = max(text.find(b"\xf5"), 0)
            said = text[offset : offset + 4].hex(" ")
            words = text.decode("utf-8", "surrogateescape")
            with self.subTest(text=text):
                self.refused(run("run", "-m", SMALL, "-p", words), "-p", offset, said)
                self.text.write_bytes(text)
                with open(self.text, encoding="utf-8", errors="surrogateescape") as stdin:
                    done = run(
                        "run", "-m", SMALL, "-f", "-", stdin=stdin.read(), errors="surrogateescape"
                    )
                self.refused(done, "standard input", offset, said)

    def test_binary_files_are_refused(self):
        self.text.write_bytes(b"GGUF\x03\x00\x00\x00 and so on")
        for arguments in (
            ["eval", "-f", self.text],
            ["run", "-f", self.text],
            ["calibrate", "-f", self.text, "-o", self.out],
        ):
            done = run(*arguments, "-m", SMALL)
            self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""))
            self.assertIn(
                f"{self.text}: this is not a text, because byte 5 is 0, as in binary files",
                done.stderr,
            )

    def test_other_bytes_are_taken(self):
        for text in TAKEN:
            with self.subTest(text=text):
                self.text.write_bytes(text)
                run(
                    "run",
                    "-m",
                    SMALL,
                    "-f",
                    self.text,
                    *"-n 1 --stock f16".split(),
                    errors="replace",
                    code=OK,
                )


if __name__ == "__main__":
    unittest.main()
