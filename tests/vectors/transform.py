"""y = R ((x - c) / s), section "Transform" of format.md."""

import functools

import numpy as np

from arithmetic import F32, SplitMix64, ordered_dot


def signs(seed, n):
    generator = SplitMix64(seed)
    words = [generator.next() for _ in range((n + 63) // 64)]
    return np.array([-1 if words[i // 64] >> (i % 64) & 1 else 1 for i in range(n)], F32)


def hadamard(x, block):
    """Transforms every block of the last axis, in Sylvester order."""
    y = x.reshape(x.shape[:-1] + (-1, block)).copy()
    distance = 1
    while distance < block:
        pairs = y.reshape(y.shape[:-1] + (-1, 2, distance))
        a, b = pairs[..., 0, :].copy(), pairs[..., 1, :].copy()
        pairs[..., 0, :], pairs[..., 1, :] = a + b, a - b
        distance *= 2
    return (y * F32(1 / np.sqrt(np.float64(block)))).reshape(x.shape)


def gram_schmidt(matrix):
    for i in range(len(matrix)):
        for _ in range(2):
            for j in range(i):
                matrix[i] -= np.dot(matrix[i], matrix[j]) * matrix[j]
        matrix[i] /= np.sqrt(np.dot(matrix[i], matrix[i]))
    return matrix


@functools.lru_cache(None)
def normal_matrix(seed, n):
    generator = SplitMix64(seed)
    return np.array([[generator.normal() for _ in range(n)] for _ in range(n)])


@functools.lru_cache(None)
def orthogonal_matrix(seed, n):
    return gram_schmidt(normal_matrix(seed, n).copy()).astype(F32)


class Rotation:
    """R, applied to rows and undone."""

    def __init__(self, kind, dim, seed, block=None, signed=True):
        self.kind, self.block = kind, block or dim
        self.signs = signs(seed, dim) if kind == "hadamard" and signed else np.ones(dim, F32)
        if kind == "dense":
            self.matrix = orthogonal_matrix(seed, dim)

    def apply(self, x):
        if self.kind == "hadamard":
            return hadamard(x * self.signs, self.block)
        if self.kind == "dense":
            return np.stack([ordered_dot(x, row) for row in self.matrix], -1)
        return x

    def undo(self, y):
        """In double precision, because decoded numbers are compared within a tolerance."""
        if self.kind == "hadamard":
            return hadamard(y, self.block) * self.signs
        if self.kind == "dense":
            return y.astype(np.float64) @ self.matrix.astype(np.float64)
        return y


def stored_channels(order, dim):
    """The stored channel of each channel of an ordered row."""
    halves = [*range(0, dim, 2), *range(1, dim, 2)]
    if order == "pairs":
        return [halves.index(channel) for channel in range(dim)]
    if order == "dealt":
        quarters = np.arange(dim // 4 * 4).reshape(4, -1)
        quarters[1:3] = quarters[1:3, ::-1].copy()
        return [*quarters.T.ravel(), *range(quarters.size, dim)]
    return halves


class Ordered:
    """W R after a permutation of channels: one matrix, whose products are summed in the order of
    stored channels.
    """

    def __init__(self, rotation, order, dim):
        self.rotation, self.stored = rotation, stored_channels(order, dim)
        self.columns = rotation.apply(np.eye(dim, dtype=F32)[np.argsort(self.stored)])

    def apply(self, x):
        y = np.zeros_like(x)
        for channel, column in enumerate(self.columns):
            y = y + x[:, channel : channel + 1] * column
        return y

    def undo(self, y):
        x = np.empty(y.shape)
        x[:, self.stored] = self.rotation.undo(y)
        return x


def largest_power_of_two(n, limit):
    block = 1
    while n % (2 * block) == 0 and 2 * block <= limit:
        block *= 2
    return block
