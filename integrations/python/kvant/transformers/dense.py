"""Attention over rows, for layers that kvant's cache does not hold, and for calls that kvant's
attention does not support. Right for every mask, and as slow as PyTorch is."""

from __future__ import annotations

import torch
from torch import Tensor


def visible(q_tokens: int, tokens: int, window: int, causal: bool, device: torch.device) -> Tensor:
    """bool [q_tokens, tokens]: the newest q_tokens of tokens are the queries."""
    at = torch.arange(tokens - q_tokens, tokens, device=device)[:, None]
    others = torch.arange(tokens, device=device)[None]
    seen = (
        others <= at if causal else torch.ones((q_tokens, tokens), dtype=torch.bool, device=device)
    )
    return seen & (others > at - window) if window else seen


def bias(
    mask: Tensor | None, window: int, causal: bool, q_tokens: int, tokens: int, device: torch.device
) -> Tensor:
    """The numbers that are added to scores, float32, broadcast to [batch, heads, q_tokens, tokens].
    `mask`: with two dimensions, to which window and causal are added; with four, which hold
    everything; or None."""
    if mask is not None and mask.dim() == 4:
        mask = mask[..., :tokens]
        return (
            mask.float()
            if mask.dtype != torch.bool
            else torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)
        )
    seen = visible(q_tokens, tokens, window, causal, device)[None, None]
    if mask is not None:
        seen = seen & mask[:, None, None, :tokens].to(torch.bool)
    return torch.zeros(seen.shape, dtype=torch.float32, device=device).masked_fill(
        ~seen, -torch.inf
    )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    added: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [batch, heads, n, d] to k and v [batch, kv heads, tokens, d]: [batch, n,
    heads, d of v], of q's dtype. A query that sees nothing gives zeros."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(groups, 1) for x in (k, v))
    scores = q.float() @ k.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + added
    if sinks is not None:
        column = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1).nan_to_num(0)  # a row of -inf only
    return (weights @ v).transpose(1, 2).contiguous().to(q.dtype)
