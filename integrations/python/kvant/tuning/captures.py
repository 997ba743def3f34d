"""Reads captures: real keys, values and queries of a model, as `kvant capture` writes them. All
shapes are compared with each other before a row is read.

A capture is a safetensors file with tensors layers.L.k, layers.L.v [n_kv_heads, tokens, head_dim]
and layers.L.q [n_heads, queries, head_dim] in F16, keys and queries after RoPE. Contexts follow one
another. The tensor `windows` (I32, one number per layer) is the number of keys that a query sees in
layers with a sliding window, and 0 in layers without one. Its metadata:

    format                      kvant-capture-1
    model, model_fingerprint    name, and 16 hexadecimal digits as kvant calibrate computes them
    text                        name of the text's file
    tokens, ctx, query_step     numbers
    layers.L.attention          factor on scores, ALiBi's largest slope, logit softcap
    kvant                       version"""

from __future__ import annotations

import contextlib
import math
import re
from typing import NamedTuple

from . import safetensors
from .safetensors import Damaged

FORMAT = "kvant-capture-1"
MAX_TOKENS, MAX_HEAD_DIM = 1 << 28, 512


class Shape(NamedTuple):
    """Attention of a layer. head_dim: of keys and of values."""

    n_kv_heads: int
    n_heads: int
    head_dim: tuple
    scale: float
    max_bias: float  # ALiBi's
    softcap: float  # 0: none
    window: int  # keys that a query sees at most; 0: all before it


class Capture(contextlib.AbstractContextManager):
    """n_layers is the highest layer in the file, plus one; layers[L] is a Shape. It is a context
    manager, too."""

    def __init__(self, path):
        self._file = safetensors.File(path)
        try:
            self._read_origin()
            self._read_layers()
        except Damaged as error:
            self.close()
            raise Damaged(f"{path}: {error}") from None

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._file.close()

    def rows(self, layer, kind):
        """float32 [heads, rows, head_dim] of a layer; kind is "k", "v" or "q"."""
        return self._file.read(f"layers.{layer}.{kind}").astype("f4")

    def contexts(self):
        """(first token, tokens, first query row, query rows) of every context."""
        per_context = self.n_ctx // self.query_step
        for number, first in enumerate(range(0, self.n_tokens, self.n_ctx)):
            length = min(self.n_ctx, self.n_tokens - first)
            yield first, length, number * per_context, length // self.query_step

    def _number(self, key):
        """A whole number of 1 to MAX_TOKENS among the metadata."""
        text = self._file.metadata.get(key, "")
        if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= MAX_TOKENS:
            raise Damaged(f"{key} is missing or not a number from 1 to {MAX_TOKENS}")
        return int(text)

    def _read_origin(self):
        if self._file.metadata.get("format") != FORMAT:
            raise Damaged(
                f"it is not a capture that this version reads ({FORMAT}): capture the model again"
            )
        self.n_tokens, self.n_ctx, self.query_step = map(
            self._number, ("tokens", "ctx", "query_step")
        )

    def _read_layers(self):
        names = (
            re.fullmatch(r"layers\.(0|[1-9][0-9]{0,5})\.[kvq]", name) for name in self._file.tensors
        )
        numbers = sorted({int(name[1]) for name in names if name})
        if not numbers:
            raise Damaged("it holds no layer")
        self.n_layers = numbers[-1] + 1
        windows = self._file.tensors.get("windows")
        if (
            windows is None
            or windows.dtype != safetensors.TYPES["I32"]
            or len(windows.shape) != 1
            or (windows.shape[0] < self.n_layers)
        ):
            raise Damaged("the tensor windows is missing or has another size")
        seen = self._file.read("windows")
        self.layers = {layer: self._shape(layer, int(seen[layer])) for layer in numbers}

    def _shape(self, layer, window):
        tensors = [self._file.tensors.get(f"layers.{layer}.{kind}") for kind in "kvq"]
        if None in tensors:
            raise Damaged(f"layer {layer} lacks keys, values or queries")
        if any(t.dtype != safetensors.TYPES["F16"] or len(t.shape) != 3 for t in tensors):
            raise Damaged(f"layer {layer}: tensors are not [heads, rows, head_dim] of F16")
        (kv_heads, tokens, dim_k), v, (heads, n_queries, dim_q) = (t.shape for t in tensors)
        queries = sum(n for *_, n in self.contexts())
        if not (
            0 < kv_heads <= heads
            and heads % kv_heads == 0
            and v[:2] == (kv_heads, tokens)
            and tokens == self.n_tokens
            and n_queries == queries
            and 0 < dim_k == dim_q <= MAX_HEAD_DIM
            and 0 < v[2] <= MAX_HEAD_DIM
            and window >= 0
        ):
            raise Damaged(f"the shapes of layer {layer} do not fit each other")
        return Shape(kv_heads, heads, (dim_k, v[2]), *self._attention(layer), window)

    def _attention(self, layer):
        key = f"layers.{layer}.attention"
        try:
            numbers = [float(word) for word in self._file.metadata.get(key, "").split()]
        except ValueError:
            numbers = []
        if len(numbers) != 3 or not all(map(math.isfinite, numbers)):
            raise Damaged(f"{key} is missing or not three numbers")
        return numbers
