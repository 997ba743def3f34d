#!/usr/bin/env python3
"""Evidence for distortion.md: OCTOPUS in NumPy, with the paper's encoder and with the library's.

They differ in two places: the paper pads the last triplet with zeros, the library tries several paddings; the
paper's 2x2 tries a level and the next higher one, the library's the levels on both sides of a number.
"""

import numpy as np

import octopus
from arithmetic import F32
from layout import TOKENS
from transform import Rotation

DIM, KEYS, NEEDLES, DISTRACTORS = 128, 16384, 64, 2048


def next_higher(at, coordinate, levels):
    return [at, np.clip(at + 1, 0, len(levels) - 1)]


def decoded(y, d_bits, n_bits, round_, paper):
    options = {"split": f"{d_bits}.{n_bits}", "round": round_, "scale": "norm"}
    two = next_higher if paper else None
    pages = np.concatenate([y, np.zeros((-len(y) % TOKENS, DIM), F32)]).reshape(-1, TOKENS, DIM)
    rows = [octopus.encode(page, "0", "K", options, 0, zero_padding=paper, two=two)[2] for page in pages]
    return np.concatenate(rows)[: len(y)]


def fidelity(y, *how):
    """mse, 1 - cos, 95th percentile of the error, error of inner products with normal queries."""
    z = decoded(y, *how).astype(float)
    error = ((z - y) ** 2).sum(1)
    cos = (z * y).sum(1) / np.sqrt((z * z).sum(1) * (y.astype(float) ** 2).sum(1))
    products = np.sqrt(2 / np.pi * error).mean()
    return error.mean() / DIM, 1 - cos.mean(), np.percentile(error, 95) / DIM, products


def needle_weight(generator, *how):
    """One needle of length sqrt(DIM) among the distractors, and 10 % noise on the query."""
    y = generator.standard_normal((1 + DISTRACTORS, DIM)).astype(F32)
    y[0] *= F32(np.sqrt(DIM)) / np.linalg.norm(y[0])
    q = y[0] + F32(0.1) * generator.standard_normal(DIM).astype(F32)
    score = decoded(y, *how).astype(float) @ q / np.sqrt(DIM)
    return 1 / np.exp(score - score[0]).sum()


def main():
    generator = np.random.default_rng(1)
    y = Rotation("hadamard", DIM, 0).apply(generator.standard_normal((KEYS, DIM)).astype(F32))
    splits = [(b + 1, b - 1) for b in (2, 3, 4)]
    cases = [(s, r) for s in splits for r in ("2x2", "3x3")]
    cases += [(s, "3x3") for s in ((2, 2), (3, 3), (4, 4), (5, 1), (6, 2))]
    print("split   rounding  encoder  mse      1 - cos  tail95   ip error")
    for split, round_ in cases:
        for name, paper in (("paper", True), ("library", False)):
            figures = "  ".join(f"{x:.5f}" for x in fidelity(y, *split, round_, paper))
            print(f"{split}  {round_:8}  {name:7}  {figures}")
    weights = [needle_weight(generator, 3, 1, "3x3", True) for _ in range(NEEDLES)]
    error = np.std(weights) / np.sqrt(NEEDLES)
    print(f"needle, 2 bits, paper's encoder: {np.mean(weights):.4f} +- {error:.4f}")


if __name__ == "__main__":
    main()
