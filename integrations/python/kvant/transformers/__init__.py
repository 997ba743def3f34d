"""A compressed cache for models of transformers, and attention that reads its pages.

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="kvant")
    cache = kvant.transformers.KvantCache(model.config, preset="balanced")
    model.generate(**inputs, past_key_values=cache)

kvant.transformers.graphs(model) makes decode steps on a GPU several times as fast.

Importing this module registers the attention implementation "kvant". ImportError when PyTorch or
transformers is missing, or when transformers is older than OLDEST."""

from ..extras import needs

OLDEST = "5.13.0"
needs("transformers", "torch")
needs("transformers", "transformers", OLDEST)

from . import interface  # noqa: E402, F401  refuses some models
from .attention import attention  # noqa: E402
from .cache import KvantCache  # noqa: E402
from .graphs import graphs  # noqa: E402
from .masks import mask  # noqa: E402

__all__ = ["KvantCache", "attention", "graphs", "mask"]
