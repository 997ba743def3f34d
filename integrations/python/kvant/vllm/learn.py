"""A calibration from the first prompts that an engine sees. Presets without a file use it at once.
KVANT_VLLM_LEARN names a .kvcal that holds it for the next start.

Rows come from the first steps of prompts, at the prompts' own positions.
KVANT_VLLM_LEARN_POSITIONS=N spreads contexts of 2048 tokens over positions 0 .. N - 1, as positions
of kvant.calibrate does. RoPE rotates a row by its position, so a row that was rotated already can
be rotated further."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, Callable

import torch
from torch import Tensor

from .. import moments
from ..arrays import np
from ..calibration import Calibration, Calibrator
from ..library import PAGE_TOKENS, Error

TOKENS, CONTEXT = 8192, 2048  # the defaults of kvant.calibrate
# Presets learn from this number of tokens. From 1024 tokens on, more tokens gain little.
ONLINE_TOKENS = 2048
_SAMPLED = 16  # every 16th query shows which keys attention looks at
_NONFINITE = 50  # KVANT_ERR_NONFINITE
LOG = logging.getLogger("vllm.kvant")  # vLLM's handlers print it


class Turn:
    """The model's RoPE, for rows that RoPE has already rotated."""

    def __init__(self, head_dim: int, n_positions: int) -> None:
        from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

        ropes = [
            rope
            for rope in _ROPE_DICT.values()
            if rope.head_size == head_dim and hasattr(rope, "cos_sin_cache")
        ]
        if len(ropes) != 1:
            raise NotImplementedError(
                "kvant: KVANT_VLLM_LEARN_POSITIONS needs a model with one RoPE for all layers: "
                "unset it"
            )
        self.adjacent = not ropes[0].is_neox_style
        self.by_position = ropes[0]._compute_cos_sin_cache().float()
        self.by_position = self.by_position / self.by_position[0, 0]  # YaRN scales
        if n_positions > len(self.by_position):
            raise ValueError(
                f"KVANT_VLLM_LEARN_POSITIONS: the model has only {len(self.by_position)} positions"
            )

    def __call__(self, rows: Tensor, by: int) -> Tensor:
        """Rows [n, heads, head_dim] as they would be `by` positions later."""
        cos, sin = self.by_position[by].to(rows.device).chunk(2)
        n = len(cos)
        pairs = (
            ((..., slice(0, 2 * n, 2)), (..., slice(1, 2 * n, 2)))
            if self.adjacent
            else ((..., slice(n)), (..., slice(n, 2 * n)))
        )
        (x, y), made = (rows[pair].float() for pair in pairs), rows.float().clone()
        made[pairs[0]], made[pairs[1]] = x * cos - y * sin, y * cos + x * sin
        return made


def _on_host(sums: dict[str, Any]) -> dict[str, Any]:
    return {name: x.cpu().numpy() if torch.is_tensor(x) else x for name, x in sums.items()}


class Learner:
    """Learns from the layers of one model, on one rank. `use` is called once, between two steps,
    with the calibration."""

    def __init__(
        self, model: str, tokens: int, use: Callable[[Calibration], None], positions: int = 0
    ) -> None:
        self.calibrator, self.tokens, self.use = Calibrator(model=model), tokens, use
        self._seen = Counter()  # type: ignore[var-annotated]
        self.done, self.positions, self.turn = False, positions, None

    def see(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float
    ) -> None:
        """Adds a prompt from its first token on, rows [n, heads, head_dim], unless enough tokens
        were seen. A prompt with a NaN or an infinity is left out: only its own output is NaN."""
        if self.done or len(k) < _SAMPLED or self._seen[layer] >= self.tokens:
            return
        if self.positions:
            q, k, v = (x[:CONTEXT] for x in (q, k, v))
            self.turn = self.turn or Turn(k.shape[2], self.positions)
            first = max(0, self.positions - len(k)) * self._seen[layer] // self.tokens
            q, k = self.turn(q, first), self.turn(k, first)
        n = len(k)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        sums = moments.of_keys(k) | moments.of_queries(q, len(k))
        if not softcap:  # scores that are not <q, k> times a factor are left out
            at = torch.arange(_SAMPLED - 1, k.shape[1], _SAMPLED, device=k.device)[:, None]
            tokens = torch.arange(k.shape[1], device=k.device)
            hidden = (tokens > at) | (at - tokens >= (window or k.shape[1]))
            added = torch.zeros(hidden.shape, dtype=torch.float32, device=k.device)
            added = added.masked_fill_(hidden, -torch.inf)
            sums |= moments.of_attention(
                q[:, _SAMPLED - 1 :: _SAMPLED], k, added, scale, PAGE_TOKENS
            )
        of_values = _on_host(moments.of_rows(v))
        if not all(np.isfinite(of_values[name]).all() for name in of_values):
            return
        try:
            self.calibrator.add_moments(layer, "k", n, **_on_host(sums))
        except Error as error:
            if error.status != _NONFINITE:
                raise
            return
        self.calibrator.add_moments(layer, "v", n, **of_values)
        self._seen[layer] += n

    def between_steps(self) -> None:
        """Ends learning after enough tokens. All layers have then seen the same prompts."""
        if not self.done and self._seen and min(self._seen.values()) >= self.tokens:
            self.done = True
            self.use(self.calibrator.finish())


def save(path: str) -> Callable[[Calibration], None]:
    def use(calibration: Calibration) -> None:
        calibration.save(path)
        LOG.warning(
            "kvant: %s holds a calibration of %d tokens, which the presets use from the next "
            "start on",
            path,
            calibration.info.n_tokens,
        )

    return use


# The learners of the model whose layers are being made, and these layers by name.
learners: list[Learner] = []
_layers: dict[str, Any] | None = None


def is_new(layers: dict[str, Any]) -> bool:
    """Whether these are the layers of another model than at the last call, whose learners are then
    forgotten. A process may load several models one after another."""
    global learners, _layers
    if layers is _layers:
        return False
    learners, _layers = [], layers
    return True


def between_steps() -> None:
    for learner in learners:
        learner.between_steps()
