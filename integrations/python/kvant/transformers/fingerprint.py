"""Tells the weights of models of one shape apart, so that nobody decodes with another fine-tune's
calibration."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

_SAMPLES = 64  # of a parameter
_LEAST = 2**-14  # smaller numbers are another one in float16


def fingerprint(module: Any) -> int:
    """Of the weights of an attention layer, as bfloat16: what a model's dtype leaves alone where its
    weights were made in bfloat16. Not 0."""
    found = hashlib.sha256()
    for name, weights in sorted(module.named_parameters()):
        flat = weights.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES].to("cpu", torch.float32)
        rounded = torch.where(some.abs() < _LEAST, 0.0, some).to(torch.bfloat16)
        found.update(name.encode() + rounded.view(torch.int16).numpy().tobytes())
    return int.from_bytes(found.digest()[:8], "little") | 1
