"""Codes of the papers in plain NumPy, written from the papers. kvant's codes are checked against
them and compared with them.

Each class takes rows [n, d] and answers products(queries) [queries, n], an estimate of the inner
products.

    TurboQuant(rows, bits, "mse")     Algorithm 1: random rotation, Lloyd-Max codes of the
                                      coordinates of a unit vector
    TurboQuant(rows, bits, "prod")    Algorithm 2: the same with one bit less, and QJL of the rest
    TurboQuant(rows, bits, "scaled")  Algorithm 1 and a factor per vector, which makes the estimate
                                      unbiased (EDEN)
    RaBitQ(rows, bits)                Gao et al. 2024: the grid point of largest cosine, found
                                      exactly, and its factor

center="rows" subtracts the mean c of all rows from them. Then <q, x> = <q, x - c> + <q, c>.
center="both" subtracts it from queries, too, and keeps <c, x> per vector. Then <q, x> = <q - c, x -
c> + <q, c> + <c, x> - <c, c>. An error grows with the length of the multiplied vectors, so both
help.
"""

import functools

import numpy as np


@functools.lru_cache(maxsize=None)
def unit_levels(d, bits):
    """Lloyd-Max levels of one coordinate of a random unit vector in d dimensions, by iteration on a
    fine grid. The coordinate's density is (1 - x^2)^((d - 3) / 2)."""
    x = np.linspace(-1, 1, 2_000_001)
    x = x[np.abs(x) < min(1, 9 / np.sqrt(d))]
    density = np.exp((d - 3) / 2 * np.log1p(-x * x))
    mass, moment = np.cumsum(density), np.cumsum(density * x)
    levels = np.linspace(-2, 2, 2**bits + 1)[:-1] / np.sqrt(d) + 2 / np.sqrt(d) / 2**bits
    for _ in range(2000):
        cuts = np.searchsorted(x, (levels[1:] + levels[:-1]) / 2)
        ends = np.concatenate([cuts, [len(x)]]) - 1
        weights, sums = np.diff(mass[ends], prepend=0), np.diff(moment[ends], prepend=0)
        moved = sums / weights
        if np.max(np.abs(moved - levels)) < 1e-9:
            break
        levels = moved
    return levels.astype(np.float32)


@functools.lru_cache(maxsize=2)
def rotation(d, seed):
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((d, d)))
    return (q * np.sign(np.diag(r))).astype(np.float32)


class Rotated:
    """Rows without their mean, their lengths, and their rotated directions."""

    def __init__(self, rows, center, seed):
        self.center = rows.mean(0) if center else np.zeros(rows.shape[1], np.float32)
        self.known = (rows - self.center) @ self.center if center == "both" else None
        rest = rows - self.center
        self.lengths = np.maximum(np.linalg.norm(rest, axis=1), 1e-30)
        self.turn = rotation(rows.shape[1], seed)
        self.directions = (rest / self.lengths[:, None]) @ self.turn

    def products(self, queries):
        rest = queries - self.center if self.known is not None else queries
        found = self.estimate(rest @ self.turn) * self.lengths + (queries @ self.center)[:, None]
        return found if self.known is None else found + self.known


class TurboQuant(Rotated):
    def __init__(self, rows, bits, form="scaled", center=None, seed=1):
        super().__init__(rows, center, seed)
        d, self.form = rows.shape[1], form
        coded = bits - 1 if form == "prod" else bits
        if coded:
            levels = unit_levels(d, coded)
            self.decoded = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, self.directions)]
        else:
            self.decoded = np.zeros_like(self.directions)
        if form == "scaled":
            self.decoded /= np.sum(self.decoded * self.directions, axis=1, keepdims=True)
        if form == "prod":
            rest = self.directions - self.decoded
            self.sketch = np.random.default_rng(seed + 1).standard_normal((d, d)).astype(np.float32)
            self.signs = np.where(rest @ self.sketch >= 0, np.float32(1), np.float32(-1))
            self.factors = np.sqrt(np.pi / 2) / d * np.linalg.norm(rest, axis=1)
        del self.directions

    def estimate(self, queries):
        found = queries @ self.decoded.T
        if self.form == "prod":
            found += (queries @ self.sketch @ self.signs.T) * self.factors
        return found


class RaBitQ(Rotated):
    def __init__(self, rows, bits, center="rows", seed=1):
        super().__init__(rows, center, seed)
        decoded = np.concatenate(
            [self.nearest(part, bits) for part in np.array_split(self.directions, 64)]
        )
        self.decoded = decoded / np.sum(decoded * self.directions, axis=1, keepdims=True)
        del self.directions

    @staticmethod
    def nearest(u, bits):
        """The vector of largest cosine with each row of u, among all vectors of odd multiples of a
        half below 2^(bits - 1). Growing a scale from 0, coordinate i steps from k - 1/2 to k + 1/2
        when the scale passes k / |u_i|. A step adds |u_i| to the product and 2 k to the squared
        length, so sums along the sorted steps give every cosine."""
        steps = np.arange(1, 2 ** (bits - 1), dtype=np.float32)
        size = np.abs(u)
        if not len(steps) or not len(u):
            return np.where(u >= 0, np.float32(0.5), np.float32(-0.5))
        at = (steps[None, :, None] / np.maximum(size, 1e-30)[:, None, :]).reshape(len(u), -1)
        order = np.argsort(at, axis=1)
        grown = np.tile(size, (1, len(steps)))
        longer = np.repeat(2 * steps, u.shape[1])
        product = 0.5 * size.sum(1, keepdims=True) + np.cumsum(
            np.take_along_axis(grown, order, 1), axis=1
        )
        square = u.shape[1] / 4 + np.cumsum(longer[order], axis=1)
        best = np.argmax(product / np.sqrt(square), axis=1)
        scale = np.take_along_axis(np.take_along_axis(at, order, 1), best[:, None], 1)
        codes = np.minimum(np.floor(size * scale * (1 + 1e-6)), len(steps)) + np.float32(0.5)
        return np.where(u >= 0, codes, -codes).astype(np.float32)

    def estimate(self, queries):
        return queries @ self.decoded.T
