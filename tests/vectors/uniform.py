"""int, bdr, kivi, innerq: section "Uniform codes" of format.md."""

import numpy as np

from arithmetic import F32, half, ordered_dot, ordered_sum, reciprocal
from layout import TOKENS, halves, padded, scalar_codes


def symmetric(y, bits):
    """y: ... x group. Returns codes, stored scale, stored zero point and decoded numbers."""
    top = F32(2 ** (bits - 1) - 1)
    scale = half(np.abs(y).max(-1) / top)
    code = np.clip(np.rint(y * reciprocal(scale)[..., None]), -top, top)
    return code.astype(int) + 2 ** (bits - 1), scale, np.zeros_like(scale), scale[..., None] * code


def asymmetric(y, bits):
    low, high = y.min(-1), y.max(-1)
    top = F32(2**bits - 1)
    zero, scale = half(low), half((high - low) / top)
    code = np.clip(np.rint((y - zero[..., None]) * reciprocal(scale)[..., None]), 0, top)
    return code.astype(int), scale, zero, zero[..., None] + scale[..., None] * code


def hybrid(y, bits, rule):
    one, other = symmetric(y, bits), asymmetric(y, bits if rule == "paper" else bits - 1)
    if rule == "paper":
        error = lambda way: ordered_dot(y - way[3], y - way[3])
    else:
        error = lambda way: ordered_sum(np.abs(y - way[3]))
    chosen = error(other) < error(one)
    each = chosen[..., None]
    return (
        np.where(each, other[0], one[0]),
        np.where(chosen, -other[1], one[1]),
        np.where(chosen, other[2], one[2]),
        np.where(each, other[3], one[3]),
    )


def quantise(y, bits, options):
    if "sym" in options:
        return symmetric(y, bits)
    if "hybrid" in options:
        return hybrid(y, bits, options["hybrid"] or "paper")
    return asymmetric(y, bits)


def per_token(y, bits, role, options):
    dim = y.shape[1]
    group = min(int(options.get("group", dim)), dim)
    parts = [quantise(y[:, start : start + group], bits, options) for start in range(0, dim, group)]
    code, decoded = (np.concatenate([part[i] for part in parts], 1) for i in (0, 3))
    scale, zero = (np.stack([part[i] for part in parts]) for i in (1, 2))
    metadata = halves(scale) if "sym" in options else halves(scale, zero)
    return scalar_codes(code, bits, role), metadata, decoded


def per_channel(y, bits, role, options):
    dim = y.shape[1]
    grouped = y.reshape(-1, int(options.get("group", 32)), dim).transpose(0, 2, 1)
    code, scale, zero, decoded = quantise(grouped, bits, options)
    back = lambda a: a.transpose(0, 2, 1).reshape(TOKENS, dim)
    wide = lambda a: np.pad(a, ((0, 0), (0, padded(dim) - dim)))
    metadata = halves(wide(scale)) if "sym" in options else halves(wide(scale), wide(zero))
    return scalar_codes(back(code), bits, role), metadata, back(decoded)


def as_int(family, bits, role, options):
    """The bits and options of the int codec that kivi and innerq stand for."""
    key = role == "K"
    group = {"group": options.get("group", "32")}
    channel = {"axis": "channel"}
    if family == "kivi":
        return int(bits), group | (channel if key else {})
    if key:
        return 3, group | {"sym": ""}
    if bits == "hybrid":
        return 2, group | channel | {"hybrid": options.get("hybrid", "paper")}
    return 3 if bits == "base" else 2, group | channel | {"sym": ""}


def encode(y, family, bits, role, options):
    if family in ("kivi", "innerq"):
        bits, options = as_int(family, bits, role, options)
    if options.get("axis") == "channel":
        return per_channel(y, int(bits), role, options)
    return per_token(y, int(bits), role, options)
