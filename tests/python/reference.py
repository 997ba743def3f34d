"""Attention in NumPy and binary64 by its definition, and how far the library's binary32 may be from
it.
"""

import numpy as np


def attention(q, k, v, scale, causal=True, window=0, softcap=0.0, mask=None, sinks=None):
    """out [n, heads, dim of v], lse [n, heads], and for each output row the sum of |weight value|
    over tokens and channels.
    """
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    n, heads, tokens = q.shape[0], q.shape[1], k.shape[0]
    group, position = heads // k.shape[1], np.arange(tokens - n, tokens)[:, None]
    out, lse, size = np.zeros((n, heads, v.shape[2])), np.zeros((n, heads)), np.zeros((n, heads))
    for h in range(heads):
        s = scale * q[:, h] @ k[:, h // group].T
        if softcap:
            s = softcap * np.tanh(s / softcap)
        if mask is not None:
            s = s + mask.astype(np.float64)
        if causal:
            s = np.where(np.arange(tokens) > position, -np.inf, s)
        if window:
            s = np.where(np.arange(tokens) <= position - window, -np.inf, s)
        all_logits = (
            s if sinks is None else np.concatenate([s, np.full((n, 1), sinks[h], np.float64)], 1)
        )
        largest = all_logits.max(1, keepdims=True)
        lse[:, h] = (largest + np.log(np.exp(all_logits - largest).sum(1, keepdims=True)))[:, 0]
        weights = np.exp(s - lse[:, h : h + 1])
        out[:, h] = weights @ v[:, h // group]
        size[:, h] = (weights @ np.abs(v[:, h // group])).sum(1)
    return out, lse, size


def largest_score(q, k, scale):
    """No score is larger than |q| |k| scale."""
    return (
        np.linalg.norm(q.astype(np.float64), axis=2).max()
        * np.linalg.norm(k.astype(np.float64), axis=2).max()
        * scale
    )


def growth(tensor):
    """How much longer numbers are where the library computes with them. With a scale, queries grow
    by up to the largest scale, and keys by up to 1 / the smallest scale. A row minus its centre is
    at most twice as long as the longest row, because the centre is a mean.
    """
    most = 1.0
    for index in range(tensor.n_blocks * len(tensor.codecs)):
        block = tensor.block(index // len(tensor.codecs), index % len(tensor.codecs))
        spread = 1.0 if block.scale is None else float(block.scale.max() / block.scale.min())
        most = max(most, spread * (1 if block.center is None else 2))
    return most


def rounding(q, k, v, scale, size, k_growth=1.0, v_growth=1.0):
    """Bound on |out - reference| per output row. A score errs by at most about (dim + 20) 2^-24 of
    the largest score, twice, for its rotation and its products. The exponential passes that on to a
    weight. The sum over values adds (tokens + dim of v + 40) 2^-24. All of it is relative to
    `size`, and is multiplied by growth (tests/unit/attention_setup.c).
    """
    tokens, dim, v_dim = k.shape[0], k.shape[2], v.shape[2]
    score = 2 * (dim + 20) * largest_score(q, k, scale) * k_growth
    return (score + v_growth * (tokens + v_dim + 40)) * 2.0**-24 * size
