"""LMCache's objects as compressed pages: a serde of the type "kvant".

    python -m kvant.lmcache server --l1-size-gb 20 --eviction-policy LRU \\
        --l2-adapter '{"type": "fs", "base_path": "/var/cache/kv",
                       "serde": {"type": "kvant", "head_dim": 128}}'

LMCache has no entry point for serdes: this command registers kvant's serde and then runs LMCache's
own command. Programs that start LMCache's server themselves call register() before."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Registers the serde with LMCache in this process. ImportError without LMCache; a second call
    does nothing."""
    from lmcache.v1.distributed.serde import get_registered_serde_types, register_serde_factory

    if "kvant" not in get_registered_serde_types():
        register_serde_factory("kvant", _processor)


def _processor(words: dict[str, Any]) -> Any:
    from .processor import processor

    return processor(words)
