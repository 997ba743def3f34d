"""Sums of a calibration over a model's rows and queries, in float64 on the device of these rows:
arguments of Calibrator.add_moments. Rows are [kv heads, n, head_dim]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def of_rows(rows: Tensor) -> dict[str, Any]:
    rows = rows.float()
    return {"sum": rows.double().sum(1), "min": rows.amin(1), "max": rows.amax(1)}


def _outer(rows: Tensor, others: Tensor) -> Tensor:
    return rows.transpose(1, 2) @ others


def of_keys(keys: Tensor) -> dict[str, Any]:
    exact = keys.double()
    return of_rows(keys) | {"spread": _outer(exact, exact)}


def of_queries(queries: Tensor, n_kv_heads: int) -> dict[str, Any]:
    """queries: [heads, n, head_dim]; heads that share a kv head follow each other."""
    exact = queries.double().reshape(n_kv_heads, -1, queries.shape[2])
    return {"moment": _outer(exact, exact), "n_queries": exact.shape[1]}


def of_attention(
    queries: Tensor, keys: Tensor, added: Tensor, scale: float, n_exact: int
) -> dict[str, Any]:
    """Sums the attention weights that these queries give to each key. `added`: [n of queries, n of
    keys], added to scores. The first n_exact keys count 0. Queries that see no key are left out."""
    groups = queries.shape[0] // keys.shape[0]
    exact, q = keys.double(), queries.double().reshape(keys.shape[0], -1, keys.shape[2])
    scores = (q @ exact.transpose(1, 2) * scale).unflatten(1, (groups, -1)) + added.double()
    p = torch.softmax(scores, -1).nan_to_num(0)
    weights = (p * (1 - p)).sum((1, 2))
    weights[:, :n_exact] = 0
    weighted = exact * weights[..., None]
    return {
        "attended": _outer(weighted, exact),
        "attended_sum": weighted.sum(1),
        "attended_weight": weights.sum(1),
    }
