"""Numbers as format.md defines them: ordered sums, half precision, random numbers.

NumPy rounds once per operation.
"""

import numpy as np

F32 = np.float32
MASK = (1 << 64) - 1


def ordered_sum(terms):
    """Sums the last axis with 16 partial sums ("Numbers")."""
    partial = np.zeros(terms.shape[:-1] + (16,), F32)
    n = terms.shape[-1]
    for start in range(0, n, 16):
        width = min(16, n - start)
        partial[..., :width] += terms[..., start : start + width]
    for half in (8, 4, 2, 1):
        partial[..., :half] += partial[..., half : 2 * half]
    return partial[..., 0]


def ordered_dot(a, b):
    return ordered_sum(a * b)


def half(x):
    """Rounds to fp16 and returns binary32."""
    return x.astype(np.float16).astype(F32)


def reciprocal(scale):
    """1 / scale, 0 where the scale is 0."""
    safe = np.where(scale > 0, scale, F32(1))
    return np.where(scale > 0, F32(1) / safe, F32(0))


class SplitMix64:
    def __init__(self, seed):
        self.state = seed & MASK

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def normal(self):
        """Approximately normal, not scaled: the 16 fields of 16 bits in 4 outputs, summed and
        centred.
        """
        total = 0
        for _ in range(4):
            word = self.next()
            total += sum(word >> shift & 0xFFFF for shift in (0, 16, 32, 48))
        return total - 16 * 32767.5


def derived_seed(seed, k):
    generator = SplitMix64(~seed & MASK)
    for _ in range(k - 1):
        generator.next()
    return generator.next()
