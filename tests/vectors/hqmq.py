"""hqmq, spherical, addvq, naive: the sections "Direction codes" and "Outliers of a page" of
format.md.
"""

import functools

import numpy as np

from arithmetic import F32, SplitMix64, derived_seed, half, ordered_sum, reciprocal
from layout import chunk_codes, halves

CONJUGATE = np.array([1, -1, -1, -1])


def product(a, b):
    a0, a1, a2, a3 = np.moveaxis(a, -1, 0)
    b0, b1, b2, b3 = np.moveaxis(b, -1, 0)
    return np.stack(
        [
            a0 * b0 - a1 * b1 - a2 * b2 - a3 * b3,
            a0 * b1 + a1 * b0 + a2 * b3 - a3 * b2,
            a0 * b2 - a1 * b3 + a2 * b0 + a3 * b1,
            a0 * b3 + a1 * b2 - a2 * b1 + a3 * b0,
        ],
        -1,
    )


def hurwitz_units():
    units = np.zeros((24, 4))
    for p in range(8):
        units[p, p // 2] = -1 if p % 2 else 1
    for m in range(16):
        units[8 + m] = [-0.5 if m >> i & 1 else 0.5 for i in range(4)]
    return units


UNITS = hurwitz_units()


class Quaternions:
    """A stream of random unit quaternions."""

    def __init__(self, seed):
        self.generator = SplitMix64(derived_seed(seed, 1))

    def next(self):
        while True:
            word = self.generator.next()
            v = [2 * (word >> shift & 0xFFFF) - 65535 for shift in (0, 16, 32, 48)]
            total = sum(x * x for x in v)
            if total <= 65535 * 65535:
                return np.array(v, float) / np.sqrt(float(total))

    def take(self, n):
        return np.array([self.next() for _ in range(n)]).reshape(n, 4)


def half_sum(y):
    a = np.abs(y)
    return ((a[..., 0] + a[..., 1]) + (a[..., 2] + a[..., 3])) * y.dtype.type(0.5)


def closeness(y):
    return np.maximum(np.abs(y).max(-1), half_sum(y))


def closest_unit(y):
    """Returns the index of the nearest unit."""
    i = np.abs(y).argmax(-1)
    largest = np.take_along_axis(y, i[..., None], -1)[..., 0]
    alone = 2 * i + (largest < 0)
    halves_ = 8 + ((y < 0) * np.array([1, 2, 4, 8])).sum(-1)
    return np.where(np.abs(largest) >= half_sum(y), alone, halves_)


def dot(x, w):
    t = x * w
    return (t[..., 0] + t[..., 1]) + (t[..., 2] + t[..., 3])


class Hqmq:
    @staticmethod
    @functools.lru_cache(None)
    def secondaries(count, book, seed):
        stream = Quaternions(seed)
        if book == "random":
            return stream.take(count)
        chosen = np.zeros((0, 4))
        for _ in range(count):
            candidates = stream.take(32)
            if len(chosen):
                far = closeness(product(candidates[:, None, :], chosen[None] * CONJUGATE)).max(1)
            else:
                far = np.zeros(32)
            chosen = np.concatenate([chosen, candidates[far.argmin()][None]])
        return chosen

    def __init__(self, name, options, seed):
        count, self.radius_bits = (int(part) for part in name.lstrip("s").split("r"))
        second = self.secondaries(count, options.get("book", "spread"), seed)
        self.second = second.astype(F32)
        self.words = product(UNITS[None], second[:, None]).reshape(-1, 4).astype(F32)

    def index(self, x, norm):
        best = np.full(x.shape[:-1], F32(-1))
        at, unit = np.zeros(best.shape, int), np.zeros(best.shape, int)
        x0, x1, x2, x3 = np.moveaxis(x, -1, 0)
        for k, (s0, s1, s2, s3) in enumerate(self.second):
            y = np.stack(
                [
                    x0 * s0 + x1 * s1 + x2 * s2 + x3 * s3,
                    x1 * s0 - x0 * s1 + x3 * s2 - x2 * s3,
                    x2 * s0 - x3 * s1 - x0 * s2 + x1 * s3,
                    x3 * s0 + x2 * s1 - x1 * s2 - x0 * s3,
                ],
                -1,
            )
            near = closeness(y)
            better = near > best
            best, at = np.where(better, near, best), np.where(better, k, at)
            unit = np.where(better, closest_unit(y), unit)
        return unit + 24 * at


class Spherical:
    def __init__(self, name, options, seed):
        self.radius_bits, n = (int(part) for part in name.lstrip("r").split("jl"))
        stream = Quaternions(seed)
        turns = stream.take((n + 3) // 4)
        g = [product(UNITS[2 * (k % 4)], turns[k // 4]) for k in range(n)]
        self.g = np.array(g).reshape(n, 4).astype(F32)
        signs = np.array(
            [[-1 if m >> k & 1 else 1 for k in range(n)] for m in range(1 << n)]
        ).reshape(-1, n)
        e = np.zeros((1 << n, 4))
        for k in range(n):
            e = e + signs[:, k : k + 1] * self.g[k].astype(float)
        a = F32(self.factor(stream.take(4096), e)) if n else F32(0)
        self.words = (UNITS[None] + float(a) * e[:, None]).reshape(-1, 4).astype(F32)

    def factor(self, u, e):
        index = self.index(u.astype(F32), np.ones(len(u), F32))
        offset = e[index // 24]
        return ((u - UNITS[index % 24]) * offset).sum() / (offset * offset).sum()

    def index(self, x, norm):
        unit = closest_unit(x)
        e = x - norm[..., None] * UNITS[unit].astype(F32)
        m = sum(
            ((dot(e, g) < 0).astype(int) << k for k, g in enumerate(self.g)),
            np.zeros(unit.shape, int),
        )
        return unit + 24 * m


class AddVq:
    def __init__(self, name, options, seed):
        self.k, self.radius_bits = (int(part) for part in name.lstrip("k").split("r"))
        self.greedy = options.get("search", "joint") == "greedy"
        b = Quaternions(seed).take(2 * self.k)
        i = np.arange(self.k * self.k)
        words = b[i % self.k] + b[self.k + i // self.k]
        self.words = (words / np.sqrt((words * words).sum(-1, keepdims=True))).astype(F32)
        self.b = b.astype(F32)

    @staticmethod
    def best(x, words):
        return dot(x[..., None, :], words).argmax(-1)

    def index(self, x, norm):
        if not self.greedy:
            return self.best(x, self.words)
        first = self.best(x, self.b[: self.k])
        rest = x - (norm * F32(0.5))[..., None] * self.b[first]
        return first + self.k * self.best(rest, self.b[self.k :])


BOOKS = {"hqmq": Hqmq, "spherical": Spherical, "addvq": AddVq}


def chunks_of(y):
    tokens, dim = y.shape
    return np.pad(y, ((0, 0), (0, -dim % 4))).reshape(tokens, -1, 4)


def outliers(norm, limit, slots):
    """Returns the slot of every chunk, -1 for none."""
    slot = np.full(norm.shape, -1)
    for t, row in enumerate(norm):
        median = np.sort(row)[(len(row) - 1) // 2]
        order = [c for c in np.argsort(-row, kind="stable") if row[c] > F32(limit) * median]
        for k, c in enumerate(order[:slots]):
            slot[t, c] = k
    return slot


def page_outliers(squared, limit, slots):
    """Returns the slot of every chunk of the page, -1 for none."""
    flat = squared.ravel()
    above = F32(limit) * F32(limit) * np.sort(flat)[(len(flat) - 1) // 2]
    largest = [c for c in np.argsort(-flat, kind="stable") if flat[c] > above][:slots]
    slot = np.full(flat.shape, -1)
    slot[np.sort(largest).astype(int)] = np.arange(len(largest))
    return slot.reshape(squared.shape)


def held_chunks(x, slot, slots):
    """The pool of a page."""
    held = np.zeros((slots, 4), F32)
    out = slot >= 0
    held[slot[out]] = x[out]
    return held


def encode_naive(y, bits, role, options):
    x = chunks_of(y)
    slots = int(options.get("slots", x.shape[0] * x.shape[1] // 16))
    slot = page_outliers(dot(x, x), float(options.get("med", 3)), slots)
    out = slot >= 0
    inner = (
        np.abs(x) if options.get("range") == "all" else np.where(out[..., None], F32(0), np.abs(x))
    )
    top = 2 ** (bits - 1) - 1
    scale = half(inner.max((1, 2)) / F32(top))
    level = np.clip(np.rint(x * reciprocal(scale)[:, None, None]), -top, top).astype(int)
    code = sum((level[..., i] + top + 1) << i * bits for i in range(4))
    code = np.where(out, slot << bits, code)
    decoded = np.where(out[..., None], half(x), scale[:, None, None] * level.astype(F32))
    metadata = halves(scale) + halves(held_chunks(x, slot, slots))
    return chunk_codes(code, 4 * bits, role), metadata, decoded.reshape(len(y), -1)[:, : y.shape[1]]


def encode(y, family, name, role, options, seed):
    book = BOOKS[family](name, options, seed)
    x = chunks_of(y)
    page = options.get("median") == "page"
    top = F32(2**book.radius_bits - 1)
    squared = dot(x, x)
    norm = np.sqrt(squared)
    limit = 3 if "med3" in options else float(options.get("med", 0))
    slots = int(options.get("slots", norm.size // 16 if page else 2)) if limit else 0
    find = page_outliers if page else outliers
    slot = find(squared if page else norm, limit, slots) if limit else np.full(norm.shape, -1)
    out = slot >= 0
    largest = norm.max(-1)
    norm = np.where(out, F32(0), norm)
    step = half((largest if options.get("range") == "all" else norm.max(-1)) / top)
    radius = np.minimum(np.rint(norm * reciprocal(step)[:, None]), top)
    index = book.index(x, norm)
    w = book.words[index]
    stored = step
    if options.get("scale", "unbiased" if family == "hqmq" else "norm") == "unbiased":
        a = ordered_sum(np.where(radius > 0, squared, F32(0)))
        b = ordered_sum(radius * dot(x, w))
        good = (step > 0) & (b > 0)
        stored = np.where(good, half(a / np.where(good, b, F32(1))), F32(0))
    decoded = (stored[:, None] * radius)[..., None] * w
    n = len(book.words)
    index_bits = (n - 1).bit_length()
    code = index | radius.astype(int) << index_bits
    r = book.radius_bits
    code = np.where(out, n + (slot >> r) | (slot & 2**r - 1) << index_bits, code)
    decoded[out] = half(x[out])
    if page:
        held = held_chunks(x, slot, slots)
    else:
        held = np.zeros((slots, len(y), 4), F32)
        for t, c in zip(*np.nonzero(out)):
            held[slot[t, c], t] = x[t, c]
    metadata = halves(stored) + halves(held)
    return (
        chunk_codes(code, index_bits + book.radius_bits, role),
        metadata,
        decoded.reshape(len(y), -1)[:, : y.shape[1]],
    )
