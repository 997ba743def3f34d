"""Lloyd-Max codebooks in double precision: Newton's method on the centroid conditions."""

import functools

import numpy as np

from arithmetic import F32

NODES, WEIGHTS = np.polynomial.legendre.leggauss(40)


def integrals(density, a, b):
    """Mass and first moment of the density over every interval."""
    middle, reach = (a + b) / 2, (b - a) / 2
    x = middle[:, None] + reach[:, None] * NODES
    f = density(x) * WEIGHTS
    return reach * f.sum(1), reach * (f * x).sum(1)


def lloyd_max(density, low, high, levels):
    """levels: a first guess, ascending, inside [low, high]."""
    c = np.array(levels, float)
    for step in range(200):
        t = np.concatenate([[low], (c[1:] + c[:-1]) / 2, [high]])
        mass, moment = integrals(density, t[:-1], t[1:])
        centroid = moment / mass
        if step < 60:
            c = centroid
            continue
        # d centroid / d t = f(t) (t - centroid) / mass at the upper end, the opposite at the lower
        f = density(t[1:-1])
        upper = np.zeros(len(c))
        lower = np.zeros(len(c))
        upper[:-1] = 0.5 * f * (t[1:-1] - centroid[:-1]) / mass[:-1]
        lower[1:] = 0.5 * f * (centroid[1:] - t[1:-1]) / mass[1:]
        jacobian = np.diag(1 - upper - lower) - np.diag(upper[:-1], 1) - np.diag(lower[1:], -1)
        change = np.linalg.solve(jacobian, c - centroid)
        c = c - change
        if np.abs(change).max() < 1e-16 * high:
            break
    return c


@functools.lru_cache(None)
def sphere_codebook(dim, bits):
    """The codebook for one coordinate of a uniform point on the sphere of radius sqrt(dim)."""
    n = 1 << (bits - 1)
    reach = min(0.9, (0.8 + 0.5 * bits) / np.sqrt(dim))
    c = lloyd_max(lambda x: (1 - x * x) ** ((dim - 3) / 2), 0, 1, reach * (np.arange(n) + 0.5) / n)
    c = (c * np.sqrt(float(dim))).astype(F32)
    return np.concatenate([-c[::-1], c])


def thresholds(codebook):
    return (codebook[1:] + codebook[:-1]) / F32(2)


def nearest(u, codebook):
    """The number of thresholds that are below u."""
    return np.searchsorted(thresholds(codebook), u, side="left")
