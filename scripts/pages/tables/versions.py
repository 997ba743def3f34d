"""Builds of llama.cpp that kvant was run on: tests/versions, SmolLM2 on a CPU."""

from results import Missing
from text import divergence, table

FILE = "versions.csv"
# Beginnings of a build's name, and where the build comes from.
ORIGINS = {
    "npm-": "npm `@node-llama-cpp/linux-x64` ",
    "py-sync-": "PyPI `llama-cpp-py-sync` ",
    "debian-": "Debian ",
}


def _origin(build):
    for begin, words in ORIGINS.items():
        if build.startswith(begin):
            return words + build[len(begin) :]
    raise Missing(f"{FILE}: no words for the build {build!r}")


def versions(results):
    """Stock builds of llama.cpp by version of ggml: whether kvant runs, and the KLD that it has."""
    rows = []
    for line in results.lines(FILE):
        ran = line["outcome"] == "runs"
        klds = [divergence(line.number(c)) if ran else "" for c in ("kld_int8", "kld_balanced")]
        outcome = "runs" if ran else f"{line['outcome']}: {line['why']}"
        rows.append([line["ggml"], line["api"], _origin(line["build"]), outcome, *klds])
    heading = ["ggml", "API", "build", "kvant", "KLD, `int-8`", "KLD, `balanced`"]
    return table(heading, *rows)
