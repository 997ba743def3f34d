"""Divergences of settings from the f16 cache, token by token, measured by `kvant eval` on chosen
contexts of texts.

A text is cut into equal parts, and the first context of each part is captured. The probe uses the
first half of the first context of a text: weights differ less between contexts than errors do, and
cost more to measure. The check uses the next contexts of the parts, one part after another and text
by text, or contexts of a separate text.

A probe makes a whole layer coarse, keys and values at once, because their weights are equal except
for a factor that all layers share. The keys of every fourth layer are also probed alone, which
shows this factor."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import numpy as np

from .. import Scheme
from ..library import PAGE_TOKENS
from . import safetensors


# The queries of a write see its rows as fp16, and a write can have up to 512 rows. A probe writes
# few rows at once, as decoding does, so that its queries see encoded rows.
PROBE_BATCH = PAGE_TOKENS


class Window(NamedTuple):
    """Tokens of a context, and the first position that counts."""

    n_ctx: int
    first: int


def probe_window(n_ctx):
    return Window(n_ctx // 2, n_ctx // 8)


def least_context(n_ctx):
    """The shortest context whose probe has rows that are not fp16, because a probe of fp16 rows
    says nothing about codecs. n_ctx if its own probe has such rows."""
    n_tokens = probe_window(n_ctx).n_ctx
    exact = Scheme("balanced", n_layers=1, n_kv_heads=1, head_dim=64).exact(n_tokens)
    opened = exact.total // PAGE_TOKENS + 1 + PROBE_BATCH // PAGE_TOKENS
    return n_ctx if n_tokens > opened * PAGE_TOKENS else 2 * (opened + 1) * PAGE_TOKENS


def check_window(n_ctx):
    return Window(n_ctx, n_ctx // 2)


class Contexts(NamedTuple):
    """`chunks` contexts of each text after the first `skip` ones, in the order of
    `kvant eval --spread parts`. batch: tokens that are written at once; None: eval's default."""

    texts: tuple
    parts: int
    skip: int
    chunks: int
    window: Window
    batch: int | None = None

    @property
    def n_tokens(self):
        return len(self.texts) * self.chunks * self.window.n_ctx

    def words(self):
        texts = [word for text in self.texts for word in ("-f", text)]
        batch = ["-b", str(self.batch)] if self.batch is not None else []
        which = f"--spread {self.parts} --skip {self.skip} --chunks {self.chunks}".split()
        window = f"-c {self.window.n_ctx} --from {self.window.first}".split()
        return [*texts, *which, *window, *batch]


def probe_contexts(texts, parts, n_ctx):
    return Contexts(tuple(texts), parts, 0, 1, probe_window(n_ctx), PROBE_BATCH)


def check_contexts(texts, parts, n_checks, n_ctx, report=None):
    """Contexts for the check, none of which is captured."""
    window = check_window(n_ctx)
    if report is not None and n_checks > 0:
        return [Contexts((report,), 1, 0, n_checks, window)]
    counts = [
        sum(check // parts % len(texts) == i for check in range(n_checks))
        for i in range(len(texts))
    ]
    return [
        Contexts((text,), parts, parts, count, window)
        for text, count in zip(texts, counts)
        if count > 0
    ]


def contexts_needed(n_texts, parts, n_checks, report=None):
    """Whole contexts that each text must have, and that the text of the report must have."""
    of_a_part = 1 + (0 if report is not None else -(-n_checks // (n_texts * parts)))
    return max(of_a_part * parts, 2), max(n_checks, 2)


class Measuring(NamedTuple):
    """How to measure. `words`: options of kvant eval; `folder`: for temporary files;
    start(words, n): runs a kvant command that reads n tokens with the model, and raises when it
    fails."""

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
    how.start(
        ["eval", *how.words, *contexts.words(), *configs, "--values", values, "--json"],
        (1 + len(paths)) * contexts.n_tokens,
    )
    with safetensors.File(values) as file:
        found = np.stack([file.read(f"kld.{i}") for i in range(1, 1 + len(paths))])  # 0 is f16
    needed = len(contexts.texts) * contexts.chunks
    if found.shape[1] != needed:
        raise safetensors.Damaged(
            f"{', '.join(contexts.texts)}: {found.shape[1]} contexts were measured, {needed} are "
            "needed"
        )
    return found


def mean_and_error(contexts):
    """The mean and the standard error of a [contexts, tokens] array. Contexts have the same number
    of tokens, so the mean is the mean of their means, and squares of their errors add up."""
    n, tokens = contexts.shape
    return float(contexts.mean()), math.sqrt(
        float((contexts.var(axis=1, ddof=1) / tokens).sum())
    ) / n


# Only every 4th layer, because keys of several coarse layers cost more together than the sum of
# their costs.
KEYS_STEP = 4
LARGEST_LOG_FACTOR = 3.0  # models have about -0.6


def probe(measure, locations):
    """Measures every layer with its first candidates and all further layers in f16. Returns the
    divergence of f16 in kvant's own cache from the stock cache. All divergences are of the same
    tokens, so their differences are more precise than each of them. `locations`: keys, then values
    of each layer; measure({label: setting}) returns float64 [settings, contexts, scored tokens]."""
    layers = list(zip(locations[::2], locations[1::2]))
    exact = [None] * len(locations)
    settings = {"no codec": exact}
    settings |= {
        f"layer {k.layer}": [*exact[: 2 * i], 0, 0, *exact[2 * i + 2 :]]
        for i, (k, _) in enumerate(layers)
    }
    settings |= {
        f"keys of layer {k.layer}": [*exact[: 2 * i], 0, *exact[2 * i + 1 :]]
        for i, (k, _) in enumerate(layers)
        if i % KEYS_STEP == 0
    }
    zero, *coarse = measure(settings)
    found = [mean_and_error(kld - zero) for kld in coarse]
    share(layers, found[: len(layers)], sum(kld for kld, _ in found[len(layers) :]))
    return float(zero.mean())


def n_probes(locations):
    n_layers = len(locations) // 2
    return 1 + n_layers + -(-n_layers // KEYS_STEP)


def share(layers, found, of_keys):
    """Divides each layer's divergence between keys and values. Weights of values are a common
    factor times the weights of keys. This factor is chosen so that the divergences of the keys that
    were probed alone have the measured sum."""
    low, high = -LARGEST_LOG_FACTOR, LARGEST_LOG_FACTOR
    for _ in range(40):
        middle = (low + high) / 2
        of_all = sum(
            max(kld, 0) * _of_keys(layer, middle)
            for layer, (kld, _) in zip(layers[::KEYS_STEP], found[::KEYS_STEP])
        )
        low, high = (middle, high) if of_all > of_keys else (low, middle)
    for (k, v), (kld, error) in zip(layers, found):
        part = _of_keys((k, v), low)
        for location, own in ((k, part), (v, 1 - part)):
            location.measured, location.measured_se = own * kld, own * error


def _of_keys(layer, log_factor):
    k, v = (location.probe_error for location in layer)
    return k / (k + math.exp(log_factor) * v) if k > 0 else 0.0
