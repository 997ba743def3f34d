"""The commands and programs on a page that a test runs, and the output that the page shows.

A comment right before an indented block marks it:

    <!-- runnable -->            shell, run by test_commands.py
    <!-- runnable: long -->      shell that takes minutes: run where the test is called with --long
    <!-- runnable: python -->    a Python program, run there in the same folder
    <!-- runnable: tiny -->      Python that wants a model: test_guide.py runs it with a tiny one
    <!-- prints -->              lines that the block before it prints; numbers and the width of
                                 columns may differ, and `...` stands for anything
    <!-- prints: exactly -->     the same, but numbers are equal on every machine, such as bytes
"""

import re

KINDS = {
    "runnable": "shell",
    "runnable: long": "long",
    "runnable: python": "python",
    "runnable: tiny": "tiny",
    "prints": "prints",
    "prints: exactly": "exactly",
}
SHOWN = ("prints", "exactly")  # kinds of blocks that a program prints
MARKER = re.compile(r"<!-- ((?:runnable|prints)[^>]*?) -->\n((?:    .*\n|\n(?=    ))*)")


def marked(text):
    """[(kind, block)] in the order of the page. Raises ValueError for an unknown marker."""
    found = []
    for name, block in MARKER.findall(text if text.endswith("\n") else text + "\n"):
        if name not in KINDS:
            raise ValueError(f"there is no marker <!-- {name} -->")
        if not block:
            raise ValueError(f"no indented block follows <!-- {name} -->")
        runs = found and found[-1][0] in ("shell", "python")
        if KINDS[name] in SHOWN and not runs:
            raise ValueError("<!-- prints --> follows no block that runs")
        found.append((KINDS[name], re.sub(r"^    ", "", block, flags=re.MULTILINE)))
    return found


def of_kind(text, kind):
    return [block for found, block in marked(text) if found == kind]


def pattern(line, exactly=False):
    """A regular expression for a line that a page shows. Columns may be wider or narrower."""
    parts = re.split(r"(\.\.\.|\d+(?:\.\d+)?|\s+)", line.strip())
    return "".join(_pattern_of(part, exactly) for part in parts)


def _pattern_of(part, exactly):
    if part == "...":
        return ".*"
    if part[:1].isdigit() and not exactly:
        return r"[\d.]+"
    return r"\s+" if part.isspace() else re.escape(part)


def not_printed(shown, printed, exactly=False):
    """Lines that the page shows and the command did not print."""
    lines = filter(str.strip, shown.splitlines())
    return [line for line in lines if not re.search(pattern(line, exactly), printed)]
