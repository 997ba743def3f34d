"""kvant: a compressed key-value cache on the GPU, for PyTorch tensors."""

from .cache import PagedCache
from .codec import Codec
from .library import Error

__all__ = ["Codec", "Error", "PagedCache"]
