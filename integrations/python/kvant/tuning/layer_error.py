"""The error that a codec causes in attention's output of one layer, on captured keys, values and
queries. It is a cheap substitute for the codec's effect on the model.

Rows are written to and read from the library's own cache, with centre and windows. The error is sum
|o' - o|^2 / sum |o|^2 over the kept queries of a part of every context, and over all heads. Here o
is the output with captured rows, and o' uses the keys or the values that the cache returns. For the
part of one kv head, the first sum has only the query heads that read it."""

from __future__ import annotations

import itertools

import numpy as np

from ..library import PAGE_TOKENS
from ..tensor import Tensor

UBATCH = 512  # tokens that llama.cpp writes at once


class Unsupported(ValueError):
    """The layer's attention is of a kind that is not computed here."""


class LayerRows:
    """A layer of one or several captures and its exact attention. It uses the first n_ctx tokens of
    every context, or of each capture's first n_contexts, and their queries from position `first`
    on. Any number of threads may use it at once."""

    def __init__(self, captures, layer, n_ctx, first, n_contexts=None):
        self.shape = captures[0].layers[layer]
        if self.shape.max_bias != 0:
            raise Unsupported(f"layer {layer}: ALiBi is not supported here")
        self._contexts = [
            context
            for capture in captures
            for context in _contexts(capture, layer, self.shape, n_ctx, first, n_contexts)
        ]
        self._size = sum(
            float(np.square(out, dtype="f8").sum()) for c in self._contexts for out in c.outputs
        )

    def error(self, role, codecs):
        """Each kv head's part of the error. `role`: "k" or "v"; `codecs`: one per kv head."""
        longest = max(c.rows[role].shape[0] for c in self._contexts)
        tensor = Tensor(codecs, n_blocks=-(-longest // PAGE_TOKENS), n_threads=1)
        errors = np.zeros(self.shape.n_kv_heads)
        for context in self._contexts:
            errors += context.errors(role, _through(tensor, context.rows[role]))
        return list(errors / self._size) if self._size > 0 else [0.0] * len(errors)


def _through(tensor, rows):
    """Rows of one context after a write to the cache and a read."""
    tensor.clear()
    for first in range(0, rows.shape[0], UBATCH):
        batch = rows[first : first + UBATCH]
        tensor.write(np.arange(first, first + batch.shape[0]), batch)
    return tensor.read(0, rows.shape[0])


def _contexts(capture, layer, shape, n_ctx, from_position, n_contexts):
    k, v, q = (capture.rows(layer, kind) for kind in "kvq")
    for first, length, first_query, n_queries in itertools.islice(capture.contexts(), n_contexts):
        positions = np.arange(1, n_queries + 1) * capture.query_step - 1
        counted = (positions >= from_position) & (positions < n_ctx)
        queries = q[:, first_query : first_query + n_queries][:, counted]
        tokens = slice(first, first + min(length, n_ctx))
        yield _Context(shape, k[:, tokens], v[:, tokens], queries, positions[counted])


class _Context:
    """Attention of one context: rows["k"] and rows["v"] are [tokens, kv heads, head_dim]. For each
    kv head, weights are [query heads x queries, tokens] and outputs [query heads x queries,
    head_dim]."""

    def __init__(self, shape, k, v, queries, positions):
        self._shape = shape
        self.rows = {
            "k": np.ascontiguousarray(k.transpose(1, 0, 2)),
            "v": np.ascontiguousarray(v.transpose(1, 0, 2)),
        }
        self._queries = queries.reshape(shape.n_kv_heads, -1, shape.head_dim[0])
        keys = np.arange(k.shape[1])
        hidden = keys > positions[:, None]
        if shape.window > 0:
            hidden |= keys <= positions[:, None] - shape.window
        self._hidden = np.tile(hidden, (shape.n_heads // shape.n_kv_heads, 1))
        self._weights = [self._softmax(self.rows["k"], head) for head in range(shape.n_kv_heads)]
        self.outputs = [w @ self.rows["v"][:, head] for head, w in enumerate(self._weights)]

    def errors(self, role, back):
        """sum |o' - o|^2 of each kv head, where back replaces the rows of a role."""
        values = back if role == "v" else self.rows["v"]
        errors = np.empty(self._shape.n_kv_heads)
        for head, exact in enumerate(self.outputs):
            weights = self._weights[head] if role == "v" else self._softmax(back, head)
            errors[head] = np.square(
                np.subtract(weights @ values[:, head], exact, dtype="f8")
            ).sum()
        return errors

    def _softmax(self, keys, head):
        scores = self._queries[head] @ keys[:, head].T
        scores *= np.float32(self._shape.scale)
        if self._shape.softcap > 0:
            scores = np.float32(self._shape.softcap) * np.tanh(
                scores / np.float32(self._shape.softcap)
            )
        scores[self._hidden] = -np.inf
        scores -= scores.max(axis=1, keepdims=True, initial=-np.inf)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=1, keepdims=True, dtype="f8").astype("f4")
        return scores
