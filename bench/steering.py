#!/usr/bin/env python3
"""Which directions should the error of a key have? Compares ways to quantise the keys of single
heads at equal bits, before any of them is a codec.

    kvant capture -m model.gguf -f text.txt -n 1024 -c 1024 --layers 0,6,12 -o model.safetensors
    kvant calibrate -m model.gguf -f another.txt -o model.kvcal
    bench/steering.py --model NAME --calibration model.kvcal --capture model.safetensors \\
        [--csv bench/results/steering.csv]

Every way codes the keys with Lloyd-Max codebooks and one scale per token, or more scales where it
says so. It is judged by the mean KL divergence of the attention probabilities of queries from token
600 on. The first 64 keys stay exact. The column 'ratio' is the divergence over the divergence of
'W', the calibrated matrix before a rotation, as the geometric mean over heads. Needs NumPy.
"""

import csv
import json
import pathlib
import struct

import numpy as np

from record import commit, machine, options_of

RANDOM = np.random.default_rng(5)
QUERY_FLOOR, LOSS_FLOOR = 3e-4, 1e-2  # as src/codec/feedback.c has them


def tensors(path):
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if entry.get("dtype") == "F16":
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            yield (
                name,
                np.frombuffer(data[start:end], np.float16).reshape(entry["shape"]).astype(float),
            )


def heads(path):
    """Layer, kv head, Q, diagonal, W of every head of the keys (calibration.md, version 2, without
    centroids)."""
    data = path.read_bytes()
    pad = lambda n: (n + 63) // 64 * 64
    n_locations, name_bytes, n_books = (
        struct.unpack_from("<I", data, at)[0] for at in (12, 56, 60)
    )
    if data[:8] != b"kvantcal" or n_books:
        raise SystemExit(f"{path}: not a calibration without centroids")
    table = pad(64 + name_bytes)
    at = pad(table + 32 * n_locations)
    for i in range(n_locations):
        layer, role, n_heads, dim = struct.unpack_from("<4I", data, table + 32 * i)
        row, triangle = n_heads * dim, dim * (dim + 1) // 2
        floats = 3 * row
        if role == 0:
            moment = (
                np.frombuffer(data, "<f4", row * dim, at + 4 * floats)
                .reshape(n_heads, dim, dim)
                .astype(float)
            )
            floats += row * dim
            diagonal = (
                np.frombuffer(data, "<f4", row, at + 4 * floats).reshape(n_heads, dim).astype(float)
            )
            floats += row
            halves = np.frombuffer(data, "<f2", n_heads * triangle, at + 4 * floats).astype(float)
            for head, part in enumerate(halves.reshape(n_heads, triangle)):
                w = np.zeros((dim, dim))
                w[np.tril_indices(dim)] = part
                yield layer, head, moment[head], diagonal[head], w + np.tril(w, -1).T
            floats += (n_heads * triangle + 1) // 2
        at += pad(4 * floats)


def codebook(bits):
    x = np.sort(np.random.default_rng(1).standard_normal(400000))
    levels = 1.3 * np.quantile(x, (np.arange(2**bits) + 0.5) / 2**bits)
    for _ in range(300):
        index = np.searchsorted((levels[1:] + levels[:-1]) / 2, x)
        levels = np.bincount(index, x, len(levels)) / np.maximum(
            np.bincount(index, minlength=len(levels)), 1
        )
    return levels


BOOKS = {bits: codebook(bits) for bits in range(2, 6)}


def nearest(x, bits):
    levels = BOOKS[bits]
    return levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x)]


def rotation(n):
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]]) / np.sqrt(2)
    return h * RANDOM.choice([-1, 1], n)


def length(y):
    return np.sqrt((y * y).mean(1, keepdims=True))


def plain(y, bits):
    code = nearest(y / length(y), bits)
    return code * (y * y).sum(1, keepdims=True) / (y * code).sum(1, keepdims=True)


class Head:
    def __init__(self, moment, diagonal, w, keys, queries):
        self.dim, self.diagonal, self.w = len(w), np.diag(diagonal), w
        q = moment * self.dim / np.trace(moment) + QUERY_FLOOR * np.eye(self.dim)
        back = np.linalg.inv(w)
        values, vectors = np.linalg.eigh(back @ q @ back)
        self.m, self.basis = values[::-1] / values.mean(), vectors[:, ::-1]
        self.keys = keys - keys[:64].mean(0)
        position = np.arange(600, len(keys), 8)
        self.queries = np.concatenate([q_head[position] for q_head in queries]) / np.sqrt(self.dim)
        self.seen = np.arange(len(keys)) <= np.tile(position, len(queries))[:, None]
        self.truth = self.log_probabilities(self.keys)

    def log_probabilities(self, keys):
        score = np.where(self.seen, self.queries @ keys.T, -np.inf)
        top = score.max(1, keepdims=True)
        return score - top - np.log(np.exp(score - top).sum(1, keepdims=True))

    def loss(self, keys):
        keys = keys.copy()
        keys[:64] = self.keys[:64]
        here, there = (
            np.where(self.seen, x, 0) for x in (self.truth, self.log_probabilities(keys))
        )
        return (np.exp(self.truth) * (here - there)).sum(1).mean()

    def through(self, matrix, code):
        """Keys through a matrix, a quantiser and back."""
        return self.loss(code(self.keys @ matrix.T) @ np.linalg.inv(matrix).T)

    def weighted(self, bits, w):
        return self.through(rotation(self.dim) @ w, lambda y: plain(y, bits))

    def allotted(self, parts):
        """More bits for directions that matter more: parts of (share, bits), each with a separate
        rotation and scale."""
        matrix, at, pieces = self.basis.T @ self.w, 0, []
        for share, bits in parts:
            n = int(self.dim * share)
            matrix[at : at + n] = (
                rotation(n) @ matrix[at : at + n] / np.sqrt(self.m[at : at + n].mean())
            )
            pieces.append((slice(at, at + n), bits))
            at += n
        return self.through(
            matrix, lambda y: np.hstack([plain(y[:, piece], bits) for piece, bits in pieces])
        )

    def steered(self, bits, s, block=1):
        """Error feedback from each block of numbers to all later blocks; keys have the spectrum
        m^s, the loss m^(2 - s)."""
        turn = rotation(self.dim)
        matrix = turn @ np.diag(self.m ** ((s - 1) / 2)) @ self.basis.T @ self.w
        h = turn @ np.diag(self.m ** (2 - s)) @ turn.T
        h += LOSS_FLOOR * np.trace(h) / self.dim * np.eye(self.dim)
        factor = np.linalg.cholesky(h[::-1, ::-1]).T[::-1, ::-1]
        return self.through(matrix, lambda y: self.feed_back(y, bits, h, factor, block))

    @staticmethod
    def feed_back(y, bits, h, factor, block):
        z = y / length(y)
        error, code = np.zeros_like(z), np.zeros_like(z)
        for at in range(0, z.shape[1], block):
            new = slice(at, at + block)
            ideal = -np.linalg.solve(factor[new, new], factor[new, :at] @ error[:, :at].T).T
            code[:, new] = nearest(z[:, new] + ideal, bits)
            error[:, new] = code[:, new] - z[:, new]
        ratio = ((z @ h) * z).sum(1) / ((z @ h) * code).sum(1)
        return code * length(y) * ratio[:, None]


def ways(bits):
    yield "W", lambda head: head.weighted(bits, head.w)
    yield "no matrix, the centre alone", lambda head: head.weighted(bits, np.eye(head.dim))
    yield "diagonal", lambda head: head.weighted(bits, head.diagonal)
    yield (
        "halves of b + 1 and b - 1 bits, a scale each",
        lambda head: head.allotted([(0.5, bits + 1), (0.5, bits - 1)]),
    )
    for s in (1, 2 / 3, 0.5, 0.3):
        yield f"feedback, s = {s:.2f}", lambda head, s=s: head.steered(bits, s)
    for block in (8, 16):
        yield (
            f"feedback, s = 0.50, between blocks of {block}",
            lambda head, n=block: head.steered(bits, 0.5, n),
        )


def measure(arguments):
    captured = dict(tensors(arguments.capture))
    inputs = []
    for layer, kv_head, moment, diagonal, w in heads(arguments.calibration):
        keys = captured.get(f"layers.{layer}.k")
        if keys is not None:
            queries = captured[f"layers.{layer}.q"]
            group = len(queries) // len(keys)
            inputs.append(
                Head(
                    moment,
                    diagonal,
                    w,
                    keys[kv_head],
                    queries[kv_head * group : (kv_head + 1) * group],
                )
            )
    for bits in (4, 3):
        first = None
        for name, way in ways(bits):
            losses = np.array([way(head) for head in inputs])
            first = losses if first is None else first
            ratio = np.exp(np.log(losses / first).mean())
            print(f"{bits} bits  {name:48s} {losses.mean():.5f}  {ratio:.3f}")
            yield [arguments.model, bits, name, len(inputs), losses.mean(), ratio]


def main():
    parser = options_of(__doc__)
    parser.add_argument("--model", required=True, help="name for the table")
    parser.add_argument("--calibration", required=True, type=pathlib.Path)
    parser.add_argument("--capture", required=True, type=pathlib.Path)
    parser.add_argument("--csv", type=pathlib.Path, help="append rows to this file")
    arguments = parser.parse_args()
    rows = list(measure(arguments))
    if arguments.csv:
        new = not arguments.csv.exists()
        with arguments.csv.open("a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(
                    [
                        "model",
                        "bits",
                        "way",
                        "heads",
                        "kld_mean",
                        "ratio",
                        "machine",
                        "commit",
                        "command",
                    ]
                )
            command = f"bench/steering.py --model {arguments.model}"
            writer.writerows([*row, machine(), commit(), command] for row in rows)


if __name__ == "__main__":
    main()
