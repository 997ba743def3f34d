"""The codebook of directions of a quaternion codec, seen from outside: how many codewords it has
and how far a direction is from the nearest.

Quaternions of length 1 are encoded. All of a row have the largest radius, so equal codes decode to
equal bits. Random directions find most codewords. The rest follow from the structure under test:
with q every p q, p a Hurwitz unit, is a codeword too, and is found only if it encodes to itself."""

import itertools

import numpy as np

# 1, i, j, k and their negatives; (+-1 +-i +-j +-k) / 2.
HURWITZ_UNITS = np.float32([*np.eye(4), *-np.eye(4), *itertools.product((-0.5, 0.5), repeat=4)])


def products(p, q):
    """p q for every p and q."""
    a, b, c, d = p.T[:, :, None]
    e, f, g, h = q.T[:, None, :]
    parts = (
        a * e - b * f - c * g - d * h,
        a * f + b * e + c * h - d * g,
        a * g - b * h + c * e + d * f,
        a * h + b * g - c * f + d * e,
    )
    return np.stack(parts, axis=-1).reshape(-1, 4)


def unit(rows):
    rows = rows.astype(np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def angles(a, b):
    """Between the directions of a and b, row by row; exact for small ones."""
    a, b = unit(a), unit(b)
    cosines = np.einsum("ij,ij->i", a, b)
    near = 2 * np.arcsin(np.minimum(np.linalg.norm(a - b, axis=1) / 2, 1))
    return np.where(cosines > 0, near, np.arccos(np.clip(cosines, -1, 1)))


def round_trip(codec, quaternions):
    per_row = codec.head_dim // 4
    surplus = -len(quaternions) % per_row  # fills the last row up, and is left out again
    filled = np.concatenate([quaternions, np.repeat(quaternions[:1], surplus, axis=0)])
    rows = filled.reshape(-1, 4 * per_row)
    return codec.decode(codec.encode(rows), len(rows)).reshape(-1, 4)[: len(quaternions)]


def distinct(quaternions):
    """By their bits."""
    found = sorted(set(quaternions.view("V16").ravel().tolist()))
    return np.frombuffer(b"".join(found), np.float32).reshape(-1, 4)


def measure(codec, directions):
    directions = unit(directions).astype(np.float32)
    decoded = round_trip(codec, directions)
    away = angles(directions, decoded)
    candidates = products(HURWITZ_UNITS, distinct(decoded))
    found = round_trip(codec, candidates)
    # The scale has half precision, which does not change a direction.
    itself = angles(candidates, found) < 1e-3
    return {
        "angle_mean": np.mean(away),
        "angle_max": np.max(away),
        "codewords": len(distinct(found[itself])),
    }
