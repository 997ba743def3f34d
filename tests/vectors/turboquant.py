"""turboquant and the residual sketch: the sections "Lloyd-Max codes" and "Residual sketch" of
format.md.
"""

import numpy as np

from arithmetic import F32, derived_seed, half, ordered_dot, reciprocal
from layout import chunk_codes, halves, pad_to, scalar_codes
from tables import nearest, sphere_codebook
from transform import Rotation, normal_matrix


def root_scale(y):
    """|y| / sqrt(d) as fp16."""
    dim = y.shape[1]
    return half(np.sqrt(ordered_dot(y, y)) * (F32(1) / np.sqrt(F32(dim))))


def lloyd_codes(y, bits, unbiased, feedback=None):
    codebook = sphere_codebook(y.shape[1], bits)
    scale = root_scale(y)
    if feedback:
        code, scale = feedback.codes(y, codebook, scale, unbiased)
        return code, scale, scale[:, None] * codebook[code]
    code = nearest(y * reciprocal(scale)[:, None], codebook)
    if unbiased:
        inner = ordered_dot(y, codebook[code])
        safe = np.where(inner > 0, inner, F32(1))
        scale = np.where(inner > 0, half(ordered_dot(y, y) / safe), F32(0))
    return code, scale, scale[:, None] * codebook[code]


class Projection:
    def __init__(self, kind, dim, seed):
        if kind == "gaussian":
            factor = (1 / np.sqrt(float(dim))) / (4 * np.sqrt((2.0**32 - 1) / 12))
            self.matrix = (normal_matrix(seed, dim) * factor).astype(F32)
            self.apply = lambda x: np.stack([ordered_dot(x, row) for row in self.matrix], -1)
            self.undo = lambda s: s.astype(float) @ self.matrix.astype(float)
        else:
            rotation = Rotation("dense" if dim & (dim - 1) else "hadamard", dim, seed)
            self.apply, self.undo = rotation.apply, rotation.undo


def sketch(residual, role, kind, seed):
    """Returns plane, norm and decoded rows."""
    projection = Projection(kind, residual.shape[1], derived_seed(seed, 1))
    bits = projection.apply(residual) < 0
    norm = root_scale(residual)
    sigma = np.where(bits, F32(-1), F32(1))
    decoded = (norm * F32(np.sqrt(np.pi / 2)))[:, None] * projection.undo(sigma)
    return scalar_codes(bits.astype(int), 1, role), norm, decoded


def outlier_mask(y):
    energy = np.zeros(y.shape[1], F32)
    for row in y:
        energy = energy + row * row
    mask = np.zeros(y.shape[1], bool)
    mask[np.argsort(-energy, kind="stable")[: y.shape[1] // 4]] = True
    return mask


def encode_tiers(y, bits, role, unbiased, seed):
    """turboquant-2.5 and -3.5: section "Tiers"."""
    mask = outlier_mask(y)
    decoded, code, scales = np.zeros(y.shape), b"", []
    for channels, wide, k in ((mask, bits + 1, 2), (~mask, bits, 3)):
        tier = y[:, channels]
        size = tier.shape[1]
        rotation = Rotation(
            "dense" if size & (size - 1) else "hadamard", size, derived_seed(seed, k)
        )
        codes, scale, back = lloyd_codes(rotation.apply(tier), wide, unbiased)
        code = pad_to(code, 16) + chunk_codes(codes, wide, role)
        decoded[:, channels] = rotation.undo(back)
        scales.append(scale)
    words = np.packbits(np.pad(mask, (0, -len(mask) % 32)), bitorder="little").tobytes()
    return code, halves(*scales) + words, decoded


def encode(y, bits, role, options, seed, feedback=None):
    if bits.endswith(".5"):
        return encode_tiers(
            y, int(bits[0]), role, options.get("scale", "unbiased") == "unbiased", seed
        )
    bits = int(bits)
    if "qjl" not in options:
        code, scale, decoded = lloyd_codes(
            y, bits, options.get("scale", "unbiased") == "unbiased", feedback
        )
        return scalar_codes(code, bits, role), halves(scale), decoded
    plane, scales, first = b"", (), np.zeros_like(y)
    if bits > 1:
        code, scale, first = lloyd_codes(y, bits - 1, False)
        plane, scales = pad_to(scalar_codes(code, bits - 1, role), 16), (scale,)
    extra, norm, decoded = sketch(y - first, role, options.get("sketch", "hadamard"), seed)
    return plane + extra, halves(*scales, norm), first + decoded
