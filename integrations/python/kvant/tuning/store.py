"""Keeps computed errors on disk, so that another budget needs neither the model nor the captures: a
JSON file with a part per key.

The key names everything that the numbers depend on: the model, the texts, the calibration, the
contexts, and METHOD."""

from __future__ import annotations

import hashlib
import json
import os

from .. import system
from .captures import Shape

METHOD = 1  # must change when kvant.tuning computes other errors from the same captures


def key_of(texts, *facts):
    """A key of everything that errors depend on: contents of files, and anything with a repr."""
    digest = hashlib.sha256(repr((METHOD, facts)).encode())
    for path in texts:
        with open(path, "rb") as file:
            digest.update(hashlib.sha256(file.read()).digest())
    return digest.hexdigest()[:32]


class Store:
    """`layers`: {layer: Shape}, empty before they are known. A file that cannot be read counts as
    empty; without a path nothing is stored."""

    def __init__(self, path=None, key=""):
        self._path, self._all = path, {}
        try:
            with open(path or os.devnull, encoding="utf-8") as file:
                self._all = json.load(file)
            self._read(key)
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
            self._all = self._all if isinstance(self._all, dict) else {}
            self._own = self._all[key] = {"layers": {}, "errors": {}}
            self.layers = {}

    def _read(self, key):
        self._own = self._all[key]
        self.layers = {
            int(layer): Shape(n_kv_heads, n_heads, tuple(head_dim), *attention)
            for layer, (n_kv_heads, n_heads, head_dim, *attention) in self._own["layers"].items()
        }
        for name, errors in self._own["errors"].items():
            if len(errors) != self.layers[int(name.split()[0])].n_kv_heads or not all(
                0 <= e < float("inf") for e in errors
            ):
                raise ValueError(name)

    def take_layers(self, layers):
        self.layers = layers
        self._own["layers"] = {str(layer): list(shape) for layer, shape in layers.items()}
        return layers

    def has(self, *name):
        return " ".join(map(str, name)) in self._own["errors"]

    def get(self, *name):
        return self._own["errors"][" ".join(map(str, name))]

    def keep(self, *name_and_errors):
        *name, errors = name_and_errors
        self._own["errors"][" ".join(map(str, name))] = errors

    def save(self):
        if self._path is not None:
            system.write_file(self._path, json.dumps(self._all).encode())
