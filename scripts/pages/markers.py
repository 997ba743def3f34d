"""Finds the markers in pages, and replaces what stands between them.

<!-- table: NAME -->            lines of Markdown, each indented like the marker
...
<!-- end -->

<!-- value: NAME -->1.13<!-- end -->        one figure inside a sentence
"""

import re

MARKER = re.compile(r"<!-- (?:(table|value): ([\w-]+)|(end)) -->")
OPENING = re.compile(r"<!--\s*(table|value|end)\b")


class Fault(Exception):
    """A marker that cannot be filled in."""


def pages(root):
    """README and every page under docs."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def names(text):
    """The names in a page's markers, in order."""
    return [found[2] for found in MARKER.finditer(text) if found[2]]


def filled(text, contents):
    """The page with contents[NAME](kind) between each pair of markers. Raises Fault."""
    if len(OPENING.findall(text)) != len(MARKER.findall(text)):
        raise Fault("a marker is neither table: NAME, nor value: NAME, nor end")
    written, end, opened = [], 0, None
    for marker in MARKER.finditer(text):
        closes = marker[3] is not None
        if opened and not closes:
            raise Fault(f"{opened[0]} is not closed")
        if closes and not opened:
            raise Fault("an end marker closes nothing")
        written.append(_content(text, opened, contents) if closes else text[end : marker.start()])
        written.append(marker[0])
        opened, end = None if closes else marker, marker.end()
    if opened:
        raise Fault(f"{opened[0]} is not closed")
    return "".join([*written, text[end:]])


def _content(text, marker, contents):
    kind, name = marker[1], marker[2]
    if name not in contents:
        raise Fault(f"there is no {kind} {name}: python3 scripts/pages --list names them")
    made = contents[name]
    if isinstance(made, str) != (kind == "value"):
        raise Fault(f"{name} is not a {kind}")
    if kind == "value":
        return made
    indent = text[: marker.start()].rpartition("\n")[2]
    if indent.strip():
        raise Fault(f"the marker of table {name} does not begin its line")
    return "".join(f"\n{(indent + line).rstrip()}" for line in made) + "\n" + indent
