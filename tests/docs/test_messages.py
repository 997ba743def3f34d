#!/usr/bin/env python3
"""docs/reference/messages.md is what the sources say, every message keeps the rules that
scripts/messages/house_style.py can see, and the script finds messages of each shape."""

import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "messages"))

import collect  # noqa: E402
import house_style  # noqa: E402
import page  # noqa: E402

HEADER = '#define NAMES "one or two"\n'


def tree(root, **files):
    """Writes files; a name's __ is a /, its last _ a dot."""
    for name, text in files.items():
        folder, _, ending = name.replace("__", "/").rpartition("_")
        path = root / f"{folder}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class Tree(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.found, cls.unknown = collect.everything(ROOT)

    def test_page(self):
        self.assertTrue(
            (ROOT / page.PATH).read_text() == page.written(self.found),
            f"{page.PATH} is not what the sources say: python3 scripts/messages writes it",
        )

    def test_every_door_has_messages(self):
        for door, least in (("library", 250), ("plugin", 90), ("command", 250), ("python", 120)):
            self.assertGreater(len({m.text for m in self.found[door]}), least, door)

    def test_every_text_is_known(self):
        """A new function with a text of several words has to be named in c_source.py."""
        self.assertEqual(self.unknown, [])

    def test_house_style(self):
        wrong = [
            f"{message.file}: {message.text}: {fault}"
            for door in self.found.values()
            for message in door
            for fault in house_style.faults(message)
        ]
        self.assertEqual(wrong, [])


class Style(unittest.TestCase):
    """Each rule finds its fault, and only its fault."""

    def faults(self, text, is_part=False):
        return len(house_style.faults(collect.Message("a.c", text, is_part)))

    def test_good(self):
        for text in (
            "cache: there is no device '<name>'; a cache can be on cpu, cuda or cuda:0",
            "KVANT_EXACT=<text> is neither auto nor a whole number of tokens",
            "hint: did you mean '<closest>'?",
            "<path>: <reason>",
            "llama.cpp turns it off for this model",
            "there is no option 'beside'",
        ):
            self.assertEqual(self.faults(text), 0, text)

    def test_private_words(self):
        for word in ("learnt", "anew", "beside", "fresh", "alone", "turned", "tell"):
            self.assertEqual(self.faults(f"a centre is {word} from rows"), 1, word)
        self.assertEqual(self.faults("no place for the codec"), 1)
        self.assertEqual(self.faults("what is learnt", is_part=True), 1)

    def test_length(self):
        text = "rows " + "x" * (house_style.SCREENFUL - 10) + " here"
        self.assertEqual(self.faults(text), 0)
        self.assertEqual(self.faults(text + "x"), 1)

    def test_begin_and_end(self):
        for text in (
            "there is no codec.",
            "there is no codec!",
            "the codecs are:",
            "The codec is new",
        ):
            self.assertEqual(self.faults(text), 1, text)
        self.assertEqual(self.faults("a spec is name-bits:key=value,..."), 0)
        self.assertEqual(self.faults("rows of a step:", is_part=True), 0)

    def test_says_nothing(self):
        for text in ("<command>: invalid argument", "rows: its size is wrong", "no codec"):
            self.assertEqual(self.faults(text), 1, text)
        self.assertEqual(self.faults("the size is wrong", is_part=True), 0)


class Sources(unittest.TestCase):
    """Messages of made-up sources."""

    def texts(self, door, **files):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            tree(root, **files)
            found, self.unknown = collect.everything(root)
            self.page = page.written(found)
        return [("part " if m.is_part else "") + m.text for m in found[door]]

    def test_fields_and_joined_literals(self):
        source = (
            HEADER
            + 'int f(int n) { return kvant_fail(e, ARGUMENT, "%zu of " "%" PRIu32 " rows; "\n'
            'NAMES " are %s, %.*s, %s", p->n_rows, (unsigned)kept, g(n), 3, text, n ? "a" : "b"); }'
        )
        wanted = "<n_rows> of <kept> rows; one or two are …, <text>, {a|b}"
        self.assertEqual(self.texts("library", src__a_c=source), [wanted])

    def test_choice(self):
        source = 'void f(void) { kvp_error(a ? "the first text" : b ? "the second" : "a third"); }'
        found = self.texts("plugin", **{"integrations__llama.cpp__a_c": source})
        self.assertEqual(found, ["the first text", "the second", "a third"])

    def test_functions_that_pass_a_text_on(self):
        source = (
            'static int inner(const char *what) { return kvant_fail(e, A, "cache: %s", what); }\n'
            "static int outer(int n, const char *what) { return inner(what); }\n"
            'int f(void) { return outer(1, "no such layer") + inner("no rows"); }'
        )
        other = 'int g(void) { return inner("this is another function of this name"); }'
        found = self.texts("library", src__a_c=source, src__b_c=other)
        self.assertEqual(found, ["cache: no such layer", "cache: no rows"])
        self.assertEqual([name for _, name, _ in self.unknown], ["inner"])

    def test_parts_and_hints(self):
        source = (
            'const char *f(void) { /* "no text" */ return "the header is damaged"; }\n'
            'void g(void) { complain("cannot read it: %s", f()); '
            'hint("use another one"); puts("a b c d e"); }'
        )
        wanted = ["part the header is damaged", "cannot read it: …", "hint: use another one"]
        self.assertEqual(self.texts("command", tools__a_c=source), wanted)
        self.assertEqual(self.unknown, [])

    def test_python(self):
        source = (
            '"""No message."""\n'
            'def f(path, value):\n    """No message, too."""\n'
            "    raise ValueError(f\"{path}: {value!r} is not one of {', '.join(NAMES)}\")\n"
            'def g(name):\n    LOG.warning("%s has %d letters", name, 3)\n'
            '    cli.fail("no text given", "give -f")\n'
            '    raise Error("read", 30, "it " "ends early")\n'
        )
        wanted = [
            "<path>: <value> is not one of <names>",
            "<name> has … letters",
            "no text given",
            "hint: give -f",
            "read: it ends early",
        ]
        found = self.texts("python", integrations__python__kvant__a_py=source)
        self.assertEqual(found, wanted)

    def test_page(self):
        call = 'kvant_fail(e, A, "one `two` | three"); '
        source = f"void f(void) {{ {call} {call} }}"
        self.texts("library", src__x__a_c=source, src__x__b_c=source)
        self.assertIn("| `one 'two' \\| three` | a.c, b.c |\n", self.page)


if __name__ == "__main__":
    unittest.main()
