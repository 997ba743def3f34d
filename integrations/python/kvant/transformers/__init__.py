"""A compressed cache for models of transformers, and attention that reads its pages.

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="kvant")
    cache = kvant.transformers.KvantCache(model.config, preset="balanced")
    model.generate(**inputs, past_key_values=cache)

kvant.transformers.graphs(model) makes decode steps on a GPU several times as fast.

Importing this module registers the attention implementation "kvant"."""

from .attention import attention
from .cache import KvantCache
from .graphs import graphs
from .masks import mask

__all__ = ["KvantCache", "attention", "graphs", "mask"]
