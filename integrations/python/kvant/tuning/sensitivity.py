"""Estimates the cost of each candidate codec to the model, per layer and role, from two sources. The error in the layer's attention
(layer_error) is known for all candidates. The divergence of the model is measured with the first candidate alone in the layer.

    cost(candidate) = measured(first) error(candidate) / error(first)"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

from .. import Codec, checks
from ..library import PAGE_TOKENS
from . import layer_error, mixes

LLAMA_UBATCH = 512
LEAST_DIVERGENCE, LEAST_ERROR, LEAST_VARIANCE = 1e-9, 1e-12, 0.01


def _with_sink(*specs):
    """With a centre the first page is kept in 16 bits; what that is worth, and what it costs in a short context, differs from layer
    to layer. So codecs are there with it and without it."""
    return [spec + end for spec in specs for end in ("", ",sink=0")]


def default_candidates(calibrated):
    """{"k": specs, "v": specs}; coarse ones first, since the first is the one that is measured in every layer."""
    if calibrated:
        feedback = [f"turboquant-{bits}:transform=file,feedback" for bits in (2, 3, 4, 5, 6, 8)]
        return {
            "k": [
                *_with_sink(*(f"trellis-{bits}:transform=file" for bits in (2, 3, 4)), *feedback),
                *(f"trellis-{bits}:transform=diagonal" for bits in (2, 3, 4)),
            ],
            "v": [
                *(spec for bits in (2, 3, 4) for spec in (*_with_sink(f"trellis-{bits}:center=file"), f"trellis-{bits}")),
                *_with_sink("turboquant-5:center=file"), "turboquant-5", "turboquant-6:center=file", "turboquant-6",
                "turboquant-8", *(f"trellis-{bits}:center=file,norm=file" for bits in (2, 3, 4)),
            ],
        }
    first = "center=first,norm=first"
    return {
        "k": [
            *_with_sink(f"trellis-2:{first}", f"trellis-3:{first}"), "trellis-3:center=first",
            *_with_sink(f"trellis-4:{first}"), "trellis-4:center=first",
            *(f"turboquant-{bits}:{first}" for bits in (5, 6, 8)),
        ],
        "v": [
            *(spec for codec in ("trellis-2", "trellis-3", "trellis-4", "turboquant-5") for spec in (f"{codec}:center=first", codec)),
            "turboquant-6", "turboquant-8",
        ],
    }


class Site:
    """Keys or values of a layer. choices: mixes.Mix, of the cache in the planned context; numbers: of that cache."""

    def __init__(self, layer, role, shape, n_cells, candidates, choices):
        self.layer, self.role, self.candidates, self.choices = layer, role, candidates, choices
        self.n_kv_heads, self.head_dim = shape.n_kv_heads, shape.head_dim["kv".index(role)]
        self.numbers = shape.n_kv_heads * self.head_dim * n_cells
        self.measured = self.measured_se = math.nan  # divergence with the first candidate, less that without any
        self.weight = math.nan  # divergence for each unit of error

    def cost(self, choice):
        return self.weight * self.choices[choice].error

    def specs(self, choice):
        """The codec of each kv head."""
        return [self.candidates[i] for i in self.choices[choice].heads]


def n_cells(shape, n_ctx):
    """Cells of a layer's cache in a context; llama.cpp gives layers with a sliding window room for the window and a batch."""
    ring = -(-(shape.window + LLAMA_UBATCH) // 256) * 256
    return min(ring, n_ctx) if shape.window > 0 else n_ctx


def bytes_of(codec, cells):
    """Sealed pages, and those that windows keep in 16 bits: sinks; recent rows, and groups that are not full, besides."""
    pages, opened = -(-cells // PAGE_TOKENS), -(-codec.sink_tokens // PAGE_TOKENS)
    if codec.recent_tokens > 0 or codec.block_tokens > 1:
        opened += -(-codec.recent_tokens // PAGE_TOKENS) + 1
    opened = min(opened, pages)
    return opened * PAGE_TOKENS * codec.head_dim * 2 + (pages - opened) * codec.page_bytes


def kind_of(codec):
    """Codecs of equal kinds fit together in one cache (kvant_codecs_fit_together)."""
    waits = codec.center == "first", codec.norm == "first"
    return codec.role, codec.head_dim, codec.block_tokens, codec.sink_tokens, codec.recent_tokens, *waits


def compute(captures, candidates, calibration, n_ctx, n_threads, check, on_layer):
    """The sites of all layers of the captures, keys before values. Candidates are computed side by side, on n_threads (None: all).
    check() is called before every candidate, and an exception of its own ends the work; on_layer() after every layer."""
    sites = []
    with ThreadPoolExecutor(checks.threads(n_threads)) as pool:
        for layer, shape in captures[0].layers.items():
            rows, cells = layer_error.LayerRows(captures, layer), n_cells(shape, n_ctx)

            def look(role, spec, layer=layer, rows=rows, shape=shape, cells=cells):
                check()
                dim = shape.head_dim["kv".index(role)]
                codecs = [Codec(spec, dim, role, calibration, layer, head) for head in range(shape.n_kv_heads)]
                return kind_of(codecs[0]), bytes_of(codecs[0], cells), rows.error(role, codecs)

            jobs = {role: [pool.submit(look, role, spec) for spec in candidates[role]] for role in "kv"}
            for role in "kv":
                kinds, sizes, errors = zip(*(job.result() for job in jobs[role]))
                choices = mixes.make(kinds, sizes, errors)
                sites.append(Site(layer, role, shape, cells, candidates[role], choices))
            on_layer()
    return sites


def weigh(sites):
    """Weights from what was measured. Measurements are noisy, and weights of one role are alike: each is drawn to the role's mean by
    as much as its own error asks for, in logarithms."""
    for role in "kv":
        of_role = [site for site in sites if site.role == role]
        mean, variance = _prior(of_role)
        for site in of_role:
            trust = variance / (variance + _log_variance(site))
            site.weight = math.exp(mean + trust * (_log_weight(site) - mean))


def _at_least(site):
    """Below half of its own error a measurement says only that the site matters little."""
    return max(site.measured, 0.5 * site.measured_se, LEAST_DIVERGENCE)


def _log_weight(site):
    """An error of 0 is that of a lossless first candidate: nothing follows from it."""
    return math.log(_at_least(site) / max(site.choices[0].error, LEAST_ERROR))


def _log_variance(site):
    return (site.measured_se / _at_least(site)) ** 2


def _prior(sites):
    """Mean of the logarithms, and the variance between sites that their errors do not explain (method of moments)."""
    logs, noise = [_log_weight(site) for site in sites], sum(_log_variance(site) for site in sites)
    n = max(len(sites), 1)
    mean = sum(logs) / n
    variance = sum(y * y for y in logs) / n - mean * mean - noise / n
    return mean, max(variance, LEAST_VARIANCE)


def agreement(sites, roles="kv"):
    """Spearman's rank correlation of the first candidates' errors with what was measured; None for fewer than 3 sites."""
    of_roles = [site for site in sites if site.role in roles]
    n = len(of_roles)
    if n < 3:
        return None
    ranks = zip(_ranks([site.choices[0].error for site in of_roles]), _ranks([site.measured for site in of_roles]))
    return 1 - 6 * sum((a - b) ** 2 for a, b in ranks) / (n * (n * n - 1))


def _ranks(values):
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    ranks = [0] * len(values)
    for rank, i in enumerate(order):
        ranks[i] = rank
    return ranks
