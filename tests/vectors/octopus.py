"""octopus: section "Octahedral codes" of format.md."""

import functools

import numpy as np

from arithmetic import F32, half, ordered_dot, ordered_sum, reciprocal
from layout import chunk_codes, halves, pad_to
from tables import lloyd_max, nearest
from turboquant import root_scale, sketch

ONE_CHANNEL = [(-1, 0.375), (-1.25, -2), (0.375, -0.375), (0, 0), (1.75, -0.125)]
ONE_CHANNEL += [(0.75, -0.125), (-2, 1), (0.75, 1.25), (-0.625, 2), (-0.125, -0.75)]
TWO_CHANNELS = [(0.3125,), (1.25,), (0.0625,), (-0.625,), (-2,), (-0.875,)]


def coordinate_density(a):
    b = 1 - a
    return (b / (1 - 2 * a + 3 * a * a) + a / (2 - 4 * a + 3 * a * a)) / np.sqrt(a * a + b * b)


@functools.lru_cache(None)
def direction_levels(bits):
    n = 1 << (bits - 1)
    c = lloyd_max(coordinate_density, 0, 1, (np.arange(n) + 0.5) / n).astype(F32)
    return np.concatenate([-c[::-1], c])


@functools.lru_cache(None)
def norm_levels(dim, bits):
    n = 1 << bits
    density = lambda r: r * r * (1 - r * r) ** ((dim - 5) / 2)
    high = min(0.95, 3.4 / np.sqrt(dim))
    return (lloyd_max(density, 0, 1, high * (np.arange(n) + 0.5) / n) * np.sqrt(float(dim))).astype(
        F32
    )


class Point:
    """Directions of pairs of levels, not yet divided by their length."""

    def __init__(self, u, w):
        z = F32(1) - np.abs(u) - np.abs(w)
        t = np.where(z < 0, -z, F32(0))
        self.x, self.y, self.z = u - np.copysign(t, u), w - np.copysign(t, w), z
        self.den = self.x * self.x + self.y * self.y + self.z * self.z


def coordinates(t):
    """Returns length, xi, eta."""
    x, y, z = np.moveaxis(t, -1, 0)
    length = np.abs(x) + np.abs(y) + np.abs(z)
    length = np.where(length == 0, F32(1), length)
    px, py, pz = x / length, y / length, z / length
    f = np.where(pz < 0, -pz, F32(0))
    return length, px, py, pz, px + np.copysign(f, px), py + np.copysign(f, py)


def tried(round_, at, coordinate, levels):
    """Returns the candidate levels."""
    if round_ == "scalar":
        return [at]
    top = len(levels) - 1
    if round_ == "2x2":
        low = np.where(coordinate > levels[at], at, at - 1)
        return [np.clip(low, 0, top), np.clip(low + 1, 0, top)]
    if round_ == "next":
        return [at, np.clip(at + 1, 0, top)]
    if round_ == "3x3":
        return [np.clip(at + step, 0, top) for step in (-1, 0, 1)]
    return [np.full(at.shape, k) for k in range(top + 1)]


def encode_triplets(t, d_bits, levels_r, round_):
    """t: ... x 3. Returns the indices u, w, k, and the projection on the direction."""
    levels = direction_levels(d_bits)
    length, px, py, pz, xi, eta = coordinates(t)
    best = None
    for u in tried(round_, nearest(xi, levels), xi, levels):
        for w in tried(round_, nearest(eta, levels), eta, levels):
            point = Point(levels[u], levels[w])
            dot = px * point.x + py * point.y + pz * point.z
            now = [u, w, dot, dot * np.abs(dot), point.den]
            if best is None:
                best = now
                continue
            better = now[3] * best[4] > best[3] * now[4]
            best = [np.where(better, a, b) for a, b in zip(now, best)]
    u, w, dot, _, den = best
    along = (length * dot) / np.sqrt(den)
    x, y, z = np.moveaxis(t, -1, 0)
    norm = np.sqrt(x * x + y * y + z * z) if round_ == "scalar" else along
    return u, w, nearest(norm, levels_r), along


def decode_triplets(u, w, k, d_bits, levels_r, stored):
    levels = direction_levels(d_bits)
    point = Point(levels[u], levels[w])
    f = (stored * levels_r[k]) / np.sqrt(point.den)
    return np.stack([f * point.x, f * point.y, f * point.z], -1)


def encode_last(t, have, d_bits, levels_r, round_, zero_padding):
    """t: tokens x 3, of which `have` channels exist. Also returns the amount that the triplet adds
    to the sum for the scale.
    """
    if round_ == "scalar" or zero_padding:
        pads = [(0,) * (3 - have)]
    else:
        pads = ONE_CHANNEL if have == 1 else TWO_CHANNELS
    size = np.abs(t[:, 0]) if have == 1 else np.abs(t[:, 0]) + np.abs(t[:, 1])
    best = None
    for pad in pads:
        trial = t.copy()
        for i, factor in enumerate(pad):
            trial[:, have + i] = F32(factor) * size
        u, w, k, along = encode_triplets(trial, d_bits, levels_r, round_)
        back = decode_triplets(u, w, k, d_bits, levels_r, F32(1))
        missed = (t[:, 0] - back[:, 0]) ** 2
        inner = t[:, 0] * back[:, 0]
        if have == 2:
            missed, inner = missed + (t[:, 1] - back[:, 1]) ** 2, inner + t[:, 1] * back[:, 1]
        now = [u, w, k, inner, missed]
        if best is None:
            best = now
        else:
            better = missed < best[4]
            best = [np.where(better, a, b) for a, b in zip(now, best)]
    return best[:4]


def split_of(bits, options):
    if "split" in options:
        return tuple(int(part) for part in options["split"].split("."))
    return int(bits) + 1, int(bits) - 1


def encode(y, bits, role, options, seed):
    tokens, dim = y.shape
    d_bits, n_bits = split_of(bits, options)
    round_, levels_r = options.get("round", "3x3"), norm_levels(dim, n_bits)
    zero_padding = options.get("pad") == "zero"
    scale = root_scale(y)
    inverse = reciprocal(scale)
    t = np.pad(y * inverse[:, None], ((0, 0), (0, -dim % 3))).reshape(tokens, -1, 3)
    u, w, k, along = encode_triplets(t, d_bits, levels_r, round_)
    inner = levels_r[k] * along
    if dim % 3:
        last = encode_last(t[:, -1], dim % 3, d_bits, levels_r, round_, zero_padding)
        u[:, -1], w[:, -1], k[:, -1], inner[:, -1] = last
    stored = scale
    if "qjl" not in options and options.get("scale", "unbiased") == "unbiased":
        total = ordered_sum(inner)
        a = (ordered_dot(y, y) * inverse) / np.where(total > 0, total, F32(1))
        stored = np.where((total > 0) & (a <= F32(4) * scale), half(a), scale)
    decoded = decode_triplets(u, w, k, d_bits, levels_r, stored[:, None]).reshape(tokens, -1)[
        :, :dim
    ]
    code = chunk_codes(u | w << d_bits | k << 2 * d_bits, 2 * d_bits + n_bits, role)
    if "qjl" not in options:
        return code, halves(stored), decoded
    extra, norm, more = sketch(y - decoded, role, options.get("sketch", "hadamard"), seed)
    return pad_to(code, 16) + extra, halves(stored, norm), decoded + more
