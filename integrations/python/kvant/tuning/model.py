"""kvant.tune: a codec for each layer and kv head of a model of transformers, measured on the
model's device."""

from __future__ import annotations

import os
import tempfile
from typing import Any, Sequence

import numpy as np
import torch
from torch import Tensor

from ..calibration import Calibration
from ..models import Texts, _measured, whole_contexts
from ..transformers.fingerprint import fingerprint
from ..watching import Seen, model_name, watch
from . import captures, probes, sensitivity, settings
from .store import Store

_QUERY_STEP = 8  # errors are computed on every 8th query


class _Kept:
    """The part of a capture that layer_error needs, in memory."""

    contexts = captures.Capture.contexts

    def __init__(self, n_ctx: int, n_tokens: int) -> None:
        self.n_ctx = n_ctx
        self.n_tokens = n_tokens
        self.query_step = _QUERY_STEP
        self.fingerprint = 0
        self.layers: dict[int, captures.Shape] = {}
        self._rows: dict[tuple[int, str], list[Any]] = {}

    def see(self, seen: Seen) -> None:
        if seen.s_aux is not None:
            raise ValueError("model: its attention has sinks, which cannot be tuned")
        layer, dims = seen.module.layer_idx, (seen.k.shape[2], seen.v.shape[2])
        self.fingerprint = self.fingerprint or fingerprint(seen.module)
        self.layers[layer] = captures.Shape(
            len(seen.k), len(seen.q), dims, seen.scale, 0.0, seen.softcap, seen.window
        )
        for kind, x in (
            ("k", seen.k),
            ("v", seen.v),
            ("q", seen.q[:, _QUERY_STEP - 1 :: _QUERY_STEP]),
        ):
            self._rows.setdefault((layer, kind), []).append(x.to("cpu", torch.float32).numpy())

    def rows(self, layer: int, kind: str) -> Any:
        return np.concatenate(self._rows[layer, kind], 1)


def _capture(model: Any, parts: Sequence[Tensor]) -> _Kept:
    kept = _Kept(len(parts[0]), sum(map(len, parts)))
    watch(model, parts, kept.see)
    if sorted(kept.layers) != list(
        range(model.config.get_text_config(decoder=True).num_hidden_layers)
    ):
        raise ValueError(
            "model: kvant cannot observe the attention of some layers, but settings need all layers"
        )
    return kept


def tune(
    model: Any,
    texts: Texts,
    tokenizer: Any = None,
    *,
    bits: float,
    path: str | os.PathLike[str],
    calibration: str | os.PathLike[str] | None = None,
    n_ctx: int = 4096,
    context: int = 2048,
    n_contexts: int = 2,
    k: Sequence[str] = (),
    v: Sequence[str] = (),
    n_threads: int | None = None,
) -> float:
    """Writes the settings file `path` for KvantCache(settings=), which has a codec for each layer
    and kv head. A cache of n_ctx tokens then takes at most `bits` per number, fp16 pages counted
    (Scheme.exact), and diverges least. Returns the divergence that is expected on the texts;
    kvant.evaluate measures it on other texts. `k`, `v`: candidates that replace the default ones,
    the coarsest first."""
    parts = whole_contexts(texts, tokenizer, context, n_contexts)
    if context < (least := probes.least_context(context)):
        raise ValueError(
            f"context: half of {context} tokens is probed, which a cache keeps as fp16; "
            f"give at least {least}"
        )
    known = Calibration(calibration) if calibration is not None else None
    candidates = sensitivity.default_candidates(known is not None)
    candidates = {"k": list(k) or candidates["k"], "v": list(v) or candidates["v"]}
    kept, store = _capture(model, parts), Store()
    for _ in sensitivity.Errors(
        store, lambda: [kept], known, context, n_threads, lambda: None
    ).complete(candidates):
        pass
    locations = sensitivity.locations_of(store, candidates, known, n_ctx)
    budget = bits * sum(location.numbers for location in locations) / 8
    if budget < sensitivity.least_bytes(locations):
        raise ValueError(
            "bits: the smallest candidates take "
            f"{bits * sensitivity.least_bytes(locations) / budget:.2f}: give at least "
            "that many bits, or coarser k and v"
        )
    writer = settings.Writer(
        locations,
        model_name(model),
        kept.fingerprint,
        known and (os.fspath(calibration), known.info),
    )  # type: ignore[type-var]
    zero = probes.probe(
        lambda wanted: _divergences(model, parts[0], probes.probe_window(context), writer, wanted),
        locations,
    )
    choice = sensitivity.choose(locations, budget)
    writer.save(choice, os.fspath(path))
    return float(zero + sum(location.cost(c) for location, c in zip(locations, choice)))


def _divergences(
    model: Any, part: Tensor, window: probes.Window, writer: Any, wanted: dict[str, Any]
) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        stored = []
        for label, setting in wanted.items():
            stored.append((label, {"settings": os.path.join(folder, label)}))
            writer.save(setting, stored[-1][1]["settings"])
        parts = [part[: window.n_ctx]]
        sums = _measured(model, parts, window.first, stored, probes.PROBE_BATCH)[1:]
    return np.array([total.kld for total in sums])[:, None]
