"""Divergences of settings from the f16 cache, token by token, measured by `kvant eval` on chosen contexts of texts.

A text is cut into equal parts. The first context of each part is measured, so a text counts from beginning to end. The check takes
the next contexts of the parts, in turn, text by text, or contexts of a text of its own."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import numpy as np

from . import safetensors


class Contexts(NamedTuple):
    """`chunks` contexts of each text after the first `skip` ones, in the order of `kvant eval --spread parts`."""

    texts: tuple
    parts: int
    skip: int
    chunks: int

    @property
    def n(self):
        return len(self.texts) * self.chunks

    def words(self):
        texts = [word for text in self.texts for word in ("-f", text)]
        return [*texts, "--spread", str(self.parts), "--skip", str(self.skip), "--chunks", str(self.chunks)]


def measured_contexts(texts, parts):
    return Contexts(tuple(texts), parts, 0, parts)


def check_contexts(texts, parts, n_checks, report=None):
    """Contexts that are never among the measured ones."""
    if report is not None:
        return [Contexts((report,), 1, 0, n_checks)]
    counts = [sum(check // parts % len(texts) == i for check in range(n_checks)) for i in range(len(texts))]
    return [Contexts((text,), parts, parts, count) for text, count in zip(texts, counts) if count > 0]


def contexts_needed(n_texts, parts, n_checks, report=None):
    """Whole contexts that each text must have, and the report's text."""
    of_a_part = 1 + (0 if report is not None else -(-n_checks // (n_texts * parts)))
    return max(of_a_part * parts, 2), max(n_checks, 2)


class Measuring(NamedTuple):
    """How to measure. words: options of kvant eval; folder: for files on the way; start(words, n, what) runs a kvant command that
    passes n contexts through the model, and raises when it fails."""

    words: list
    folder: str
    writer: object
    start: object


def divergences(how, settings, contexts):
    """float64 [settings, contexts, scored tokens]. settings: {label: setting}."""
    paths = [os.path.join(how.folder, label) for label in settings]
    for setting, path in zip(settings.values(), paths):
        how.writer.save(setting, path)
    values = os.path.join(how.folder, "values")
    configs = [word for path in paths for word in ("--config", path)]
    how.start(["eval", *how.words, *contexts.words(), *configs, "--values", values, "--json"], (1 + len(paths)) * contexts.n)
    with safetensors.File(values) as file:
        found = np.stack([file.read(f"kld.{i}") for i in range(1, 1 + len(paths))])  # 0 is f16
    if found.shape[1] != contexts.n:
        raise safetensors.Damaged(f"{', '.join(contexts.texts)}: {found.shape[1]} contexts were measured, {contexts.n} are needed")
    return found


def mean_and_error(contexts):
    """Of a [contexts, tokens] array. Contexts have the same number of tokens: the mean is that of means, squares of errors add up."""
    n, tokens = contexts.shape
    return float(contexts.mean()), math.sqrt(float((contexts.var(axis=1, ddof=1) / tokens).sum())) / n


def probe(how, sites, contexts, name_of):
    """Measures every site with its first candidate, everything else f16. Returns the divergence of f16 in the plug-in's own cache
    from llama.cpp's. Divergences are of the same tokens, so their difference is known better than either."""
    exact = [None] * len(sites)
    settings = {"no codec": exact}
    for i, site in enumerate(sites):
        settings[name_of(site)] = [*exact[:i], 0, *exact[i + 1 :]]
    zero, *coarse = divergences(how, settings, contexts)
    for site, found in zip(sites, coarse):
        site.measured, site.measured_se = mean_and_error(found - zero)
    return float(zero.mean())
