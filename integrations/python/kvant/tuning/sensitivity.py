"""Estimates the cost of each candidate codec to the model, per layer and role, from two sources.
The error in the layer's attention (layer_error) is known for all candidates. The divergence of the
model is measured only with the layer's first candidates.

    cost(candidate) = measured(first) error(candidate) / error(first, on the measured tokens)"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

from .. import Codec, Scheme, checks
from ..codec import step_bytes, tensor_bytes
from ..library import PAGE_TOKENS
from . import allocate, layer_error, mixes, probes

LLAMA_UBATCH = 512
LEAST_DIVERGENCE, LEAST_ERROR, LEAST_VARIANCE = 1e-9, 1e-12, 0.01


def _with_sink(*specs):
    """Each spec twice: unchanged, and with sink=0. A codec with a centre keeps the first page in 16
    bits unless sink=0. The gain from that page, and its cost in a short context, differ from layer
    to layer."""
    return [spec + end for spec in specs for end in ("", ",sink=0")]


def default_candidates(calibrated):
    """{"k": specs, "v": specs}, coarse ones first: the first one is measured in every layer."""
    if calibrated:
        feedback = [f"turboquant-{bits}:transform=file,feedback" for bits in (2, 3, 4, 5, 6, 8)]
        return {
            "k": [
                *_with_sink(*(f"trellis-{bits}:transform=file" for bits in (2, 3, 4)), *feedback),
                *(f"trellis-{bits}:transform=diagonal" for bits in (2, 3, 4)),
            ],
            "v": [
                *(
                    spec
                    for bits in (2, 3, 4)
                    for spec in (*_with_sink(f"trellis-{bits}:center=file"), f"trellis-{bits}")
                ),
                *_with_sink("turboquant-5:center=file"),
                "turboquant-5",
                "turboquant-6:center=file",
                "turboquant-6",
                "turboquant-8",
                *(f"trellis-{bits}:center=file,norm=file" for bits in (2, 3, 4)),
            ],
        }
    first = "center=first,norm=first"
    return {
        "k": [
            *_with_sink(f"trellis-2:{first}", f"trellis-3:{first}"),
            "trellis-3:center=first",
            *_with_sink(f"trellis-4:{first}"),
            "trellis-4:center=first",
            *(f"turboquant-{bits}:{first}" for bits in (5, 6, 8)),
        ],
        "v": [
            *(
                spec
                for codec in ("trellis-2", "trellis-3", "trellis-4", "turboquant-5")
                for spec in (f"{codec}:center=first", codec)
            ),
            "turboquant-6",
            "turboquant-8",
        ],
    }


class Site:
    """Keys or values of a layer. `choices`: mixes.Mix, of the cache in the planned context;
    `numbers`: of that cache."""

    def __init__(self, layer, role, shape, n_cells, candidates, choices):
        self.layer, self.role, self.candidates, self.choices = layer, role, candidates, choices
        self.n_kv_heads, self.head_dim = shape.n_kv_heads, shape.head_dim["kv".index(role)]
        self.numbers = shape.n_kv_heads * self.head_dim * n_cells
        self.window = shape.window
        self.step_bytes = step_bytes(_n_blocks(n_cells), shape.n_kv_heads * self.head_dim)
        self.probe_error = math.nan  # of the first candidate, on the tokens of the probe
        self.measured = self.measured_se = (
            math.nan
        )  # divergence with the first candidate, less that without any
        self.weight = math.nan  # divergence for each unit of error

    def cost(self, choice):
        return self.weight * self.choices[choice].error

    def specs(self, choice):
        """The codec of each kv head."""
        return [self.candidates[i] for i in self.choices[choice].heads]


def n_cells(shape, n_ctx):
    """Cells of a layer's cache in a context. llama.cpp gives layers with a sliding window room for
    the window and a batch."""
    ring = -(-(shape.window + LLAMA_UBATCH) // 256) * 256
    return min(ring, n_ctx) if shape.window > 0 else n_ctx


def _n_blocks(cells):
    return -(-cells // PAGE_TOKENS)


def bytes_of(codec, cells):
    """Memory of a kv head's rows in a cache that a settings file chooses. It has pages for all
    cells, and the fp16 pages of Scheme.exact, or more if the codec needs more. All kv heads share
    the fp16 pages for the rows of a step, which shared_bytes counts."""
    exact = Scheme("balanced", n_layers=1, n_kv_heads=1, head_dim=codec.head_dim).exact(cells)
    return tensor_bytes([codec], 1, _n_blocks(cells), exact)


def kind_of(codec):
    """Codecs of equal kinds fit together in one cache."""
    waits = codec.center == "first", codec.norm == "first"
    return (
        codec.role,
        codec.head_dim,
        codec.block_tokens,
        codec.sink_tokens,
        codec.recent_tokens,
        *waits,
    )


class Errors:
    """Errors of candidates, from captures or from a Store that has them. It calls open_captures()
    when the first error is missing. It calls check() before every candidate; an exception there
    ends the work. Candidates are computed on n_threads threads (None: all)."""

    def __init__(self, store, open_captures, calibration, n_ctx, n_threads, check):
        self._store = store
        self._open = open_captures
        self._calibration = calibration
        self._check = check
        self._windows = {
            "cost": probes.check_window(n_ctx),
            "probe": (*probes.probe_window(n_ctx), 1),
        }
        self._threads = checks.threads(n_threads)

    def complete(self, candidates):
        """Computes the errors that the store lacks: of all candidates on half of the tokens, of the
        first ones also on the tokens of the probe. After every layer it yields the number of all
        layers."""
        wanted = [("cost", role, spec) for role in "kv" for spec in candidates[role]]
        wanted += [("probe", role, candidates[role][0]) for role in "kv"]
        with ThreadPoolExecutor(self._threads) as pool:
            layers = self._store.layers or self._store.take_layers(self._open()[0].layers)
            for layer in layers:
                missing = [job for job in wanted if not self._store.has(layer, *job)]
                for job, found in zip(missing, self._compute(pool, layer, missing)):
                    self._store.keep(layer, *job, found)
                if missing:
                    self._store.save()
                yield len(layers)

    def _compute(self, pool, layer, jobs):
        kinds = {kind for kind, *_ in jobs}
        rows = {
            kind: layer_error.LayerRows(self._open(), layer, *self._windows[kind]) for kind in kinds
        }

        def error(job):
            self._check()
            kind, role, spec = job
            return rows[kind].error(
                role, codecs_of(spec, role, self._store.layers[layer], self._calibration, layer)
            )

        return pool.map(error, jobs)


def codecs_of(spec, role, shape, calibration, layer):
    """One codec per kv head."""
    dim = shape.head_dim["kv".index(role)]
    return [Codec(spec, dim, role, calibration, layer, head) for head in range(shape.n_kv_heads)]


def locations_of(store, candidates, calibration, n_ctx):
    """The sites of all layers, keys before values, in a context of n_ctx. The store is complete."""
    locations = []
    for layer, shape in store.layers.items():
        cells = n_cells(shape, n_ctx)
        for role in "kv":
            codecs = [
                codecs_of(spec, role, shape, calibration, layer)[0] for spec in candidates[role]
            ]
            kinds = [kind_of(codec) for codec in codecs]
            sizes = [bytes_of(codec, cells) for codec in codecs]
            errors = [store.get(layer, "cost", role, spec) for spec in candidates[role]]
            location = Site(
                layer, role, shape, cells, candidates[role], mixes.make(kinds, sizes, errors)
            )
            location.probe_error = sum(store.get(layer, "probe", role, candidates[role][0]))
            locations.append(location)
    return locations


def choose(locations, budget):
    """The choice of each site, or None when the budget is below least_bytes. The sites must be
    measured."""
    weigh(locations)
    choices = [
        [(mix.bytes, location.cost(c)) for c, mix in enumerate(location.choices)]
        for location in locations
    ]
    return allocate.allocate(choices, budget - shared_bytes(locations))


def shared_bytes(locations):
    """Memory for the rows of a step. The keys of all layers of a cache share it, and so do the
    values of all layers. It is large enough for each layer. Layers with a sliding window are in a
    second cache."""
    rooms = {}
    for location in locations:
        cache = location.window, location.role
        rooms[cache] = max(rooms.get(cache, 0), location.step_bytes)
    return sum(rooms.values())


def total_bytes(locations, choice):
    return shared_bytes(locations) + sum(
        location.choices[c].bytes for location, c in zip(locations, choice)
    )


def least_bytes(locations):
    return shared_bytes(locations) + sum(
        min(mix.bytes for mix in location.choices) for location in locations
    )


def weigh(locations):
    """Computes weights from the measurements. Measurements are noisy, but weights of one role are
    similar. So each weight is moved towards the role's mean, in logarithms, the further the larger
    its error is."""
    for role in "kv":
        of_role = [location for location in locations if location.role == role]
        mean, variance = _prior(of_role)
        for location in of_role:
            trust = variance / (variance + _log_variance(location))
            location.weight = math.exp(mean + trust * (_log_weight(location) - mean))


def _at_least(location):
    """A measurement below half of its standard error says only that the site matters little."""
    return max(location.measured, 0.5 * location.measured_se, LEAST_DIVERGENCE)


def _log_weight(location):
    """An error of 0 means that the first candidate is lossless, and says nothing about the
    weight."""
    return math.log(_at_least(location) / max(location.probe_error, LEAST_ERROR))


def _log_variance(location):
    return (location.measured_se / _at_least(location)) ** 2


def _prior(locations):
    """Mean of the logarithms, and the variance between sites that their errors do not explain
    (method of moments)."""
    logs = [_log_weight(location) for location in locations]
    noise = sum(_log_variance(location) for location in locations)
    n = max(len(locations), 1)
    mean = sum(logs) / n
    variance = sum(y * y for y in logs) / n - mean * mean - noise / n
    return mean, max(variance, LEAST_VARIANCE)
