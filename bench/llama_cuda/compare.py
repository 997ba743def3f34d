#!/usr/bin/env python3
"""compare.py VOCABULARY REFERENCE OTHER... - logits of compare.c: mean divergence from the
reference, and how many most probable tokens are equal."""

import sys

import numpy as np

vocabulary = int(sys.argv[1])


def log_probabilities(path):
    x = np.fromfile(path, np.float32).reshape(-1, vocabulary).astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


reference = log_probabilities(sys.argv[2])
for path in sys.argv[3:]:
    other = log_probabilities(path)
    n = min(len(reference), len(other))
    p, q = reference[:n], other[:n]
    divergence = (np.exp(p) * (p - q)).sum(axis=1)
    same = p.argmax(axis=1) == q.argmax(axis=1)
    parts = [("prompt", 0, 2), ("steps", 2, 102), ("restored", 102, 122), ("shifted", 122, 142)]
    cells = [f"{name} {divergence[a:b].mean():.2e}" for name, a, b in parts if b <= n]
    print(
        f"{path.rsplit('/', 1)[-1]:28s} KLD: {'  '.join(cells)}  {int(same.sum())} of {n} tokens "
        "equal"
    )
