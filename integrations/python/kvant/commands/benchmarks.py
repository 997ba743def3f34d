"""Shared parts of `kvant bench attention`, `cuda` and `encode`: codecs of the command line, rounds,
results.

A subject is one implementation that is measured: attention over caches of one shape, or a codec
that encodes. It has run(), which returns the seconds of one call, and check(), which fails on an
output that cannot be right. For attention it also has bytes (of keys and values that one call
reads) and close(). A subject measures time itself, because a GPU has a separate clock."""

import math
import re
import statistics

import numpy as np

import kvant

from . import cli, specs, table

DISTINCT_ROWS = 2048  # a longer cache repeats them: the time does not depend on their content
MAX_PAIRS = 24

CODEC_OPTIONS = """\
  -k, --codec-k SPEC      codec of keys, may be repeated (default: a list of common ones)
  -v, --codec-v SPEC      codec of values (default: the one of the -k before it)
"""


class Stopped(Exception):
    """Ctrl-C: the command prints all complete results."""


def add_codec(pairs, name, spec):
    """Adds -k or -v, in the order of the command line, to the pairs of specs."""
    if name == "codec-k":
        if len(pairs) == MAX_PAIRS:
            cli.fail(f"more than {MAX_PAIRS} codecs are given", code=cli.USAGE)
        pairs.append([spec, spec])
    elif pairs:
        pairs[-1][1] = spec
    else:
        cli.fail(
            f"-v {spec} has no -k before it", "give them in pairs: -k SPEC -v SPEC", code=cli.USAGE
        )


def codec_pairs(command, pairs, usual):
    """The pairs of the command line, checked, or the pairs of a default list."""
    for pair in pairs:
        for role, spec in zip("kv", pair):
            specs.check(command, f"-{role}", spec, role)
    return pairs or [[spec, spec] for spec in possible(usual)]


def possible(usual):
    """The codecs of a default list whose families this build has."""
    families = {family.name for family in kvant.codecs()}
    return [spec for spec in usual if re.split("[-:]", spec)[0] in families]


def numbers(option, text, least, most):
    """The numbers of "N,N,..."."""
    return [cli.whole(option, word, least, most) for word in text.split(",")]


def normal(seed, *shape):
    """Normally distributed float32, the same in every run."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def measure(subjects, rounds, step):
    """The median seconds of each subject. A round measures all subjects before the next round
    begins, so a change in the machine's speed meets them alike. The first run of each is a warm-up,
    whose output is checked. step(subject): called after every run."""
    taken = [[] for _ in subjects]
    for subject in subjects:
        subject.run()
        subject.check()
        step(subject)
    for _ in range(rounds):
        for subject, seconds in zip(subjects, taken):
            seconds.append(subject.run())
            step(subject)
    return [statistics.median(seconds) for seconds in taken]


def work_of(n_queries, n_tokens, heads, head_dim):
    """The work of a run in products, for progress. Preparing a subject counts as one run."""
    return n_queries * n_tokens * heads * head_dim + 1e8


def stepper(progress):
    """Counts the work of a subject's runs, and ends the measurement on Ctrl-C."""

    def step(subject):
        progress.add(subject.work, subject.label)
        if cli.interrupted():
            raise Stopped

    return step


def show(columns, rows, json):
    """rows: lists of values in the order of the columns; None and NaN are absent."""
    keys = [column.key for column in columns]
    named = [dict(zip(keys, row)) for row in rows]
    if json:
        cli.print_json(
            [
                {
                    key: None if isinstance(x, float) and math.isnan(x) else x
                    for key, x in row.items()
                }
                for row in named
            ]
        )
    else:
        table.print_columns(columns, named)
