"""kvant.tune: a codec for each layer and kv head of a model of transformers, measured where the model runs."""

from __future__ import annotations

import os
import tempfile
from contextvars import ContextVar
from typing import Any, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from ..calibration import Calibration
from ..models import Texts, _attending, _contexts, _measured
from ..transformers import attention, mask
from ..transformers.fingerprint import fingerprint
from . import captures, probes, sensitivity, settings
from .store import Store

_QUERY_STEP = 8  # of the queries that errors are computed on, one in so many


class _Kept:
    """What layer_error asks of a capture, in memory."""

    contexts = captures.Capture.contexts

    def __init__(self, n_ctx: int, n_tokens: int) -> None:
        self.n_ctx, self.n_tokens, self.query_step, self.fingerprint = n_ctx, n_tokens, _QUERY_STEP, 0
        self.layers: dict[int, captures.Shape] = {}
        self._rows: dict[tuple[int, str], list[Any]] = {}

    def add(self, module: Any, shape: captures.Shape, **rows: Tensor) -> None:
        self.fingerprint = self.fingerprint or fingerprint(module)
        self.layers[module.layer_idx] = shape
        for kind, x in rows.items():
            self._rows.setdefault((module.layer_idx, kind), []).append(x.to("cpu", torch.float32).numpy())

    def rows(self, layer: int, kind: str) -> Any:
        return np.concatenate(self._rows[layer, kind], 1)


_keeping: ContextVar[_Kept] = ContextVar("keeping")


def _keep(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if s_aux is not None:
        raise ValueError("model: attention with sinks of its own cannot be tuned")
    window = getattr(getattr(attention_mask, "kvant", None), "window", options.get("sliding_window") or 0)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    heads = key.shape[1], query.shape[1], (key.shape[3], value.shape[3])
    rows = {"k": key[0], "v": value[0], "q": query[0][:, _QUERY_STEP - 1 :: _QUERY_STEP]}
    _keeping.get().add(module, captures.Shape(*heads, scale, 0.0, softcap or 0.0, window), **rows)
    return attention(module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, **options)


AttentionInterface.register("kvant_keep", _keep)
AttentionMaskInterface.register("kvant_keep", mask)


def _capture(model: Any, parts: Sequence[Tensor]) -> _Kept:
    kept = _Kept(len(parts[0]), sum(map(len, parts)))
    token = _keeping.set(kept)
    try:
        with _attending(model, "kvant_keep"):
            for part in parts:
                model(part[None].to(model.device), use_cache=False, logits_to_keep=1)
    finally:
        _keeping.reset(token)
    if sorted(kept.layers) != list(range(model.config.get_text_config(decoder=True).num_hidden_layers)):
        raise ValueError("model: it has layers without attention that kvant sees; settings need it in all")
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
    """Writes the settings file `path` for KvantCache(settings=): a codec for each layer and kv head, so that a cache of n_ctx tokens
    takes at most so many bits per number, all of it counted, and diverges least. Returns the divergence that is expected on the
    texts; kvant.evaluate measures it on others. k, v: candidates in place of the default ones, the coarsest first."""
    parts = [part for part in _contexts(texts, tokenizer, context, context * n_contexts) if len(part) == context]
    if not parts or context < 64:
        raise ValueError(f"texts: fewer tokens than one context of {context}, or a context below 64")
    known = Calibration(calibration) if calibration is not None else None
    candidates = sensitivity.default_candidates(known is not None)
    candidates = {"k": list(k) or candidates["k"], "v": list(v) or candidates["v"]}
    kept, store = _capture(model, parts), Store()
    for _ in sensitivity.Errors(store, lambda: [kept], known, context, n_threads, lambda: None).complete(candidates):
        pass
    sites = sensitivity.sites_of(store, candidates, known, n_ctx)
    budget = bits * sum(site.numbers for site in sites) / 8
    if budget < sensitivity.least_bytes(sites):
        raise ValueError(f"bits: the smallest candidates take {bits * sensitivity.least_bytes(sites) / budget:.2f}")
    name = getattr(model.config, "_name_or_path", "") or model.config.model_type
    writer = settings.Writer(sites, name, kept.fingerprint, known and (os.fspath(calibration), known.info))  # type: ignore[type-var]
    zero = probes.probe(lambda wanted: _divergences(model, parts[0], probes.probe_window(context), writer, wanted), sites)
    choice = sensitivity.choose(sites, budget)
    writer.save(choice, os.fspath(path))
    return float(zero + sum(site.cost(c) for site, c in zip(sites, choice)))


def _divergences(model: Any, part: Tensor, window: probes.Window, writer: Any, wanted: dict[str, Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        stored = []
        for label, setting in wanted.items():
            stored.append((label, {"settings": os.path.join(folder, label)}))
            writer.save(setting, stored[-1][1]["settings"])
        sums = _measured(model, [part[: window.n_ctx]], window.first, stored)[1:]
    return np.array([total.kld for total in sums])[:, None]
