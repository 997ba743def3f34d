"""kvant: a compressed key-value cache on the GPU, for PyTorch tensors."""

import importlib

_HOMES = {"Codec": "codec", "Error": "library", "PagedCache": "cache"}
__all__ = sorted(_HOMES)


def __getattr__(name):
    """Imports what is asked for: kvant.commands works where PyTorch is not installed."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvant' has no attribute '{name}'")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__():
    return sorted([*globals(), *__all__])
