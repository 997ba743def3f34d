"""llama.cpp's architectures on kvant's cache: tests/archs, tiny models of random weights on a CPU.

models.csv next to this package maps the names that people know to llama.cpp's architectures. It was
read in llama.cpp's converters (conversion/*.py, v0.5.0), which name models for each architecture.
"""

import csv
import pathlib

from results import Missing
from text import code, table

FILE = "archs.csv"
NAMES = pathlib.Path(__file__).resolve().parent.parent / "models.csv"
UNTRIED = "llama.cpp's test makes no such model"


def _served(line):
    """How kvant serves a model of this architecture, in words."""
    outcome = line["outcome"]
    words = {
        "right": "all layers",
        "right, on decoded copies": "all layers, but attention reads decoded copies",
        "right, not compressed": "nothing: the cache stays llama.cpp's",
        "right, has no cache": "nothing: there is no cache",
        UNTRIED: "not tried",
    }
    if outcome.startswith("refused: "):
        return "**refused**"
    if outcome not in words:
        raise Missing(f"{FILE}, line {line.place}: no words for the outcome {outcome!r}")
    if "not compressed" in outcome and not line["cache"]:
        outcome = "right, has no cache"
    what = "latents, on CPUs" if "latents" in line["cache"] else "keys and values"
    if outcome == "right" and "recurrent state" in line["cache"]:
        return f"{what}; the state stays llama.cpp's"
    if outcome == "right" and "keys alone" in line["cache"]:
        return f"{what}; the indexer's keys stay llama.cpp's"
    if outcome == "right" and "latents" in line["cache"]:
        return what
    return words[outcome]


def _name(results, line):
    """Architectures that were tried dense and with experts have two lines."""
    several = len(results.lines(FILE, {"architecture": line["architecture"]})) > 1
    experts = " with experts" if several and line["model"] == "moe" else ""
    return code(line["architecture"]) + experts


def known_models(results):
    """Models by the names that people know: their architecture, and what kvant compresses."""
    rows = []
    with open(NAMES, newline="") as file:
        for known in csv.DictReader(file):
            lines = results.lines(FILE, {"architecture": known["architecture"]})
            served = list(dict.fromkeys(map(_served, lines)))
            if len(served) != 1:
                raise Missing(f"{FILE}: {known['architecture']} has {len(served)} answers, not one")
            rows.append([known["models"], code(known["architecture"]), served[0]])
    return table(["models", "architecture", "kvant compresses"], *rows)


def architectures(results):
    """Every architecture of llama.cpp: cache, layers, and errors relative to q8_0 and q4_0."""
    rows = []
    for line in sorted(results.lines(FILE), key=lambda line: line["architecture"]):
        layers = line["layers"] not in ("", "0")
        compressed = f"{line['compressed']} of {line['layers']}" if layers else ""
        ratios = [line["int-8/q8_0"], line["balanced/q4_0"]]
        rows.append([_name(results, line), line["cache"], compressed, *ratios, _served(line)])
    heading = ["architecture", "cache", "layers compressed", "error, `int-8` / `q8_0`"]
    return table([*heading, "error, `balanced` / `q4_0`", "kvant compresses"], *rows)
