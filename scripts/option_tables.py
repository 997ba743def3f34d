"""The option tables of all commands, as the program prints them with --describe. completion.py and
reference.py use them."""

import json
import os
import subprocess
from typing import NamedTuple

from kvant.commands.cli import Option

CPU = Option(
    None,
    "cpu",
    "LEVEL",
    "instruction set of kvant, before the command: auto, c, avx2, avx2vnni, avx512, avx512vnni,\n"
    "avx512vbmi, neon or neondot",
)


class Table(NamedTuple):
    name: str  # "eval", "bench model"
    summary: str
    usage: str
    about: str
    notes: str
    options: list


def _ask(*words):
    program = os.environ.get("KVANT_COMMAND", "kvant")
    return json.loads(
        subprocess.run([program, *words, "--describe"], check=True, stdout=subprocess.PIPE).stdout
    )


def _table(words, summary):
    told = _ask(*words)
    return Table(
        told["command"],
        summary,
        told["usage"],
        told["about"],
        told["notes"] or "",
        [Option(**o) for o in told["options"]],
    )


def read():
    """A table per command; benchmarks are under their two words. Commands that this build lacks are
    left out."""
    names = []
    for item in _ask():
        inner = _ask("bench") if item["name"] == "bench" else []
        names += [((item["name"], one["name"]), one["summary"]) for one in inner] or [
            ((item["name"],), item["summary"])
        ]
    tables = []
    for words, summary in names:
        try:
            tables.append(_table(words, summary))
        except (ValueError, subprocess.CalledProcessError):
            pass
    return tables


def specs():
    """The specs of all codecs at all widths."""
    program = os.environ.get("KVANT_COMMAND", "kvant")
    rows = json.loads(
        subprocess.run([program, "codecs", "--json"], check=True, stdout=subprocess.PIPE).stdout
    )
    return [row["spec"] for row in rows]
