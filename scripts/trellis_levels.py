#!/usr/bin/env python3
"""Makes the levels of `trellis` (src/codec/trellis_book.c) by Lloyd iterations over its 64 states.

A Viterbi search with a free start quantises normal numbers. Then every level moves to the mean of
the numbers that chose it; levels i and n - 1 - i move together, so that they stay each other's
negatives. In the end levels are scaled so that the outermost is 127, and rounded. Prints one line
for each number of bits: the scale (levels per standard deviation), the error, the positive half of
the levels.

    trellis_levels.py [--tokens N] [--rounds N]"""

import argparse

import numpy as np

MEMORY = 6
TAPS = (0o010, 0o101, 0o042)
SUBSETS = 8


def subset_of_windows():
    window = np.arange(2 << MEMORY)
    return sum((np.bitwise_count(window & taps) & 1) << i for i, taps in enumerate(TAPS))


def search(x, levels, subset):
    """Index of the level that each number of x (sequences x steps) is quantised to."""
    n_sequences, n_steps = x.shape
    states = 1 << MEMORY
    by_subset = levels.reshape(-1, SUBSETS)
    distance = np.abs(x[:, :, None, None] - by_subset)
    free = distance.argmin(2)
    cost = np.take_along_axis(distance, free[:, :, None], 2)[:, :, 0] ** 2
    new = np.arange(states)
    metric = np.zeros((n_sequences, states))
    decisions = np.zeros((n_steps, n_sequences, states), bool)
    for t in range(n_steps):
        low = metric[:, new >> 1] + cost[:, t, subset[new]]
        high = metric[:, new >> 1 | states // 2] + cost[:, t, subset[new | states]]
        decisions[t] = high < low
        metric = np.minimum(low, high)
        metric -= metric.min(1, keepdims=True)
    row, state = np.arange(n_sequences), metric.argmin(1)
    index = np.zeros(x.shape, int)
    for t in range(n_steps - 1, -1, -1):
        window = state + states * decisions[t, row, state]
        z = subset[window]
        index[:, t] = free[row, t, z] * SUBSETS + z
        state = window >> 1
    return index


def first_levels(bits):
    """Quantiles, stretched as the cube root of the density asks."""
    n = 4 << bits
    quantiles = np.sort(np.random.default_rng(0).standard_normal(1 << 20))
    return 1.3 * quantiles[((np.arange(n) + 0.5) / n * len(quantiles)).astype(int)]


def lloyd(bits, x, rounds):
    levels, subset = first_levels(bits), subset_of_windows()
    levels = (levels - levels[::-1]) / 2
    for _ in range(rounds):
        index = search(x, levels, subset)
        error = ((x - levels[index]) ** 2).mean()
        sums = np.bincount(index.ravel(), x.ravel(), len(levels))
        counts = np.bincount(index.ravel(), minlength=len(levels))
        levels = (sums - sums[::-1]) / np.maximum(counts + counts[::-1], 1)
    return levels, error


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    x = np.random.default_rng(1).standard_normal((args.tokens, 1500))
    for bits in (2, 3, 4):
        levels, error = lloyd(bits, x, args.rounds)
        scale = int(127 / levels.max())
        whole = np.rint(levels * scale).astype(int)
        print(
            f"{bits} bits, {scale} a standard deviation, error {error:.5f}:",
            *whole[len(whole) // 2 :],
        )


if __name__ == "__main__":
    main()
