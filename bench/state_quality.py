#!/usr/bin/env python3
"""Measures how much a codec for a store of states would lose: the KLD of next tokens after a prompt
whose keys and values were transformed, quantised and transformed back. bench/state_codec.py has the
bits that Gaussian coefficients need.

    bench/state_quality.py --text wiki.test.raw --rope 100000 MODEL.gguf \\
        --csv bench/results/state_quality.csv

Every head is scaled to the same energy. A transform is the eigenvectors of the covariance of
`--fit` contexts, of keys without RoPE and of values. All coefficients get the same step, which is
the best choice with an entropy coder, and gives weak ones no bits. Bits are the entropy of each
coefficient's symbols in the tested contexts. With `exact` "64+128" the first 64 and the newest 128
tokens of the prompt stay as they are, as with kvant's presets. The model runs with transformers on
a CPU in float32. `encode_ms` and `decode_ms` are a token's transforms and rounding in one thread,
without a coder."""

import argparse
import csv
import math
import pathlib
import sys
import time

import torch
from record import context, model_name
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache

EXACT = {"0": (0, 0), "64+128": (64, 128)}
GROUPS = {"head": 0, "layer": 1, "4 layers": 4, "all layers": 10**6}


def rotations(n, dim, base):
    angles = torch.arange(n)[:, None] * base ** (-torch.arange(0, dim, 2) / dim)
    return angles.cos(), angles.sin()


def rotated(keys, base, sign):
    """Keys [heads, tokens, head_dim] that RoPE rotates further, or back."""
    cos, sin = rotations(*keys.shape[1:], base)
    a, b = keys.chunk(2, -1)
    return torch.cat((a * cos - sign * b * sin, b * cos + sign * a * sin), -1)


def capture(model, tokens, base):
    """Two tensors [layers, heads, tokens, head_dim]: keys without RoPE, and values."""
    cache = DynamicCache(config=model.config)
    model(tokens[None], past_key_values=cache, use_cache=True)
    keys = [rotated(layer.keys[0], base, -1) for layer in cache.layers]
    return torch.stack(keys), torch.stack([layer.values[0] for layer in cache.layers])


class Transform:
    """Eigenvectors of groups of heads. Rows are [layers, heads, tokens, head_dim]."""

    def __init__(self, rows, size):
        self.size = size
        self.center = rows.mean(2, keepdim=True)
        self.scale = ((rows - self.center) ** 2).mean((2, 3), keepdim=True).sqrt()
        parts = self.parts((rows - self.center) / self.scale)
        self.vectors = [torch.linalg.eigh(x.T @ x / len(x))[1] for x in parts]

    def parts(self, rows):
        """[tokens, coefficients] of each group."""
        if self.size == 0:
            return list(rows.flatten(0, 1))
        return [x.permute(2, 0, 1, 3).flatten(1) for x in rows.split(self.size)]

    def joined(self, parts, like):
        if self.size == 0:
            return torch.stack(parts).view_as(like)
        layers, heads, n, dim = like.shape
        found = [x.view(n, -1, heads, dim).permute(1, 2, 0, 3) for x in parts]
        return torch.cat(found)

    def encode(self, rows, step):
        parts = self.parts((rows - self.center) / self.scale)
        return [torch.round(x @ v / step) for x, v in zip(parts, self.vectors)]

    def decode(self, symbols, step, like):
        parts = [x * step @ v.T for x, v in zip(symbols, self.vectors)]
        return self.joined(parts, like) * self.scale + self.center


def entropy(symbols):
    """Mean bits of a coefficient of [tokens, coefficients]."""
    total = 0.0
    for column in symbols.T:
        p = torch.unique(column, return_counts=True)[1] / len(column)
        total -= float((p * p.log2()).sum())
    return total / symbols.shape[1]


@torch.no_grad()
def next_logits(model, rows, tokens, base):
    """log-probabilities of the tokens behind a prompt with these rows."""
    cache = DynamicCache(config=model.config)
    for i, (keys, values) in enumerate(zip(*rows)):
        cache.update(rotated(keys, base, 1)[None], values[None], i)
    logits = model(tokens[None], past_key_values=cache, use_cache=True).logits[0]
    return torch.log_softmax(logits.float(), -1)


@torch.no_grad()
def measure(model, parts, fit, n, base, steps):
    found = [capture(model, tokens[:n], base) for tokens in parts]
    fits = [torch.cat([rows[i] for rows in found[:fit]], 2) for i in range(2)]
    exact = [next_logits(model, r, t[n:], base) for r, t in zip(found[fit:], parts[fit:])]
    for name, size in GROUPS.items():
        transforms = [Transform(x, size) for x in fits]
        for step in steps:
            symbols, times, klds = [[], []], [0.0, 0.0], {exact: [] for exact in EXACT}
            for rows, tokens, p in zip(found[fit:], parts[fit:], exact):
                begun = time.process_time()
                coded = [t.encode(x, step) for t, x in zip(transforms, rows)]
                times[0] += time.process_time() - begun
                begun = time.process_time()
                restored = [t.decode(c, step, x) for t, c, x in zip(transforms, coded, rows)]
                times[1] += time.process_time() - begun
                for kept, (first, newest) in EXACT.items():
                    for x, y in zip(rows, restored):
                        y[:, :, :first] = x[:, :, :first]
                        y[:, :, n - newest :] = x[:, :, n - newest :]
                    q = next_logits(model, restored, tokens[n:], base)
                    klds[kept].append((p.exp() * (p - q)).sum(-1))
                for of, c in zip(symbols, coded):
                    of.append(c)
            bits = [
                sum(entropy(torch.cat(x)) * x[0].shape[1] for x in zip(*of))
                / sum(x.shape[1] for x in of[0])
                for of in symbols
            ]
            ms = [1e3 * x / (n * len(exact)) for x in times]
            for kept, of in klds.items():
                yield name, step, kept, sum(bits) / 2, *bits, torch.cat(of), ms


def main():
    a = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    a.add_argument("model", type=pathlib.Path)
    a.add_argument("--text", required=True, type=pathlib.Path)
    a.add_argument("--rope", required=True, type=float, help="the base")
    a.add_argument("--context", type=int, default=1024)
    a.add_argument("--next", type=int, default=128)
    a.add_argument("--fit", type=int, default=12)
    a.add_argument("--test", type=int, default=4)
    a.add_argument("--steps", type=float, nargs="*", default=[0.5, 0.7, 1.0, 1.4])
    a.add_argument("--csv", type=pathlib.Path)
    a = a.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(a.model.parent, gguf_file=a.model.name)
    model = AutoModelForCausalLM.from_pretrained(
        a.model.parent, gguf_file=a.model.name, dtype=torch.float32
    ).eval()
    each, count = a.context + a.next, a.fit + a.test
    ids = tokenizer(a.text.read_text()[: 8 * each * count], add_special_tokens=False)["input_ids"]
    parts = torch.tensor(ids[: each * count]).split(each)
    lines = []
    for name, step, kept, bits, k, v, kld, ms in measure(
        model, parts, a.fit, a.context, a.rope, a.steps
    ):
        line = dict(model=model_name(a.model), transform=name, step=step, exact=kept)
        line |= dict(bits=f"{bits:.3f}", k_bits=f"{k:.3f}", v_bits=f"{v:.3f}")
        line |= dict(kld_mean=f"{float(kld.mean()):.5f}")
        line |= dict(kld_se=f"{float(kld.std()) / math.sqrt(len(kld)):.5f}", tokens=len(kld))
        line |= dict(encode_ms=f"{ms[0]:.3f}", decode_ms=f"{ms[1]:.3f}")
        line |= dict(fit_tokens=a.fit * a.context, text=a.text.name, **context(sys.argv))
        lines.append(line)
        print(*line.values(), flush=True)
    if a.csv:
        new = not a.csv.exists()
        with a.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    main()
