"""A calibration from the first prompts that an engine sees: KVANT_VLLM_LEARN names the .kvcal, for the next start."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from .. import moments
from ..calibration import Calibrator
from ..library import PAGE_TOKENS

TOKENS = 8192  # as of kvant.calibrate
_SAMPLED = 16  # one query in so many shows which keys attention looks at
LOG = logging.getLogger("vllm.kvant")  # vLLM's handlers print it


class Learner:
    """Of the layers of one model, on one rank."""

    def __init__(self, path: str, model: str) -> None:
        self.path, self.calibrator, self._seen = path, Calibrator(model=model), Counter()  # type: ignore[var-annotated]
        self.done = False

    def see(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float) -> None:
        """A prompt from its first token on, rows [n, heads, head_dim]. The first layer's after enough of them ends it."""
        if self.done or len(k) < _SAMPLED:
            return
        if self._seen[layer] >= TOKENS:
            self._save()
            return
        self._seen[layer] += len(k)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        sums = moments.of_keys(k) | moments.of_queries(q, len(k))
        if not softcap:  # scores that are not <q, k> times a factor are left out
            at, tokens = torch.arange(_SAMPLED - 1, k.shape[1], _SAMPLED)[:, None], torch.arange(k.shape[1])
            hidden = (tokens > at) | (at - tokens >= (window or k.shape[1]))
            added = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf).to(k.device)
            sums |= moments.of_attention(q[:, _SAMPLED - 1 :: _SAMPLED], k, added, scale, PAGE_TOKENS)
        self._add(layer, "k", k, sums)
        self._add(layer, "v", v, moments.of_rows(v))

    def _add(self, layer: int, role: str, rows: Tensor, sums: dict[str, Any]) -> None:
        named = {name: x.cpu().numpy() if torch.is_tensor(x) else x for name, x in sums.items()}
        self.calibrator.add_sums(layer, role, rows.shape[1], **named)

    def _save(self) -> None:
        self.done = True
        self.calibrator.finish().save(self.path)
        LOG.warning("kvant: %s holds a calibration of %d tokens, which the presets take from the next start on", self.path, TOKENS)
