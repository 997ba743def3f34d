"""The HTML page of `kvant report`: one file that loads nothing. Fills page/page.html with style,
scripts and data."""

import json
import os
import pathlib
import re

from . import report_file

PAGE = pathlib.Path(__file__).parent / "page"
PLOT = (
    pathlib.Path(os.environ.get("KVANT_DATA", "")) / "plot"
)  # the plotting library (scripts/fetch.py plot)


def has_figures():
    """Whether this build has the plotting library; without it pages have tables only."""
    return PLOT.is_dir()


def _read(*files):
    return "".join(file.read_text(encoding="utf-8") for file in files)


def _data(results):
    """JSON inside HTML. "<" occurs only in strings, where JSON can write it in another way, so no
    name can end the script."""
    licences = (
        {"licences": _read(PLOT / "LICENSE-d3", PLOT / "LICENSE-plot")} if has_figures() else {}
    )
    return json.dumps({**results, **licences}, separators=(",", ":")).replace("<", "\\u003c")


def write(path, results):
    parts = {
        "style": _read(PAGE / "page.css"),
        "library": _read(PLOT / "d3.min.js", PLOT / "plot.umd.min.js") if has_figures() else "",
        "script": _read(PAGE / "figures.js", PAGE / "page.js"),
        "data": _data(results),
    }
    template = _read(PAGE / "page.html")
    report_file.replace(path, re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], template))
