"""LMCache's own storage manager, configured as in its server, with kvant's serde. It stores objects
in L2 and loads them.
"""

import argparse
import json
import logging
import os
import pathlib
import sys
import time

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
sys.path[:0] = [
    str(pathlib.Path(__file__).resolve().parents[1]),
    str(pathlib.Path(__file__).resolve().parents[3] / "integrations" / "python"),
]

import torch  # noqa: E402

import kvant.lmcache  # noqa: E402

kvant.lmcache.register()

from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)  # noqa: E402
from lmcache.v1.distributed.config import (  # noqa: E402
    add_storage_manager_args,
    parse_args_to_config,
)
from lmcache.v1.distributed.storage_manager import StorageManager  # noqa: E402

torch.set_num_threads(1)
TASKS = "lmcache.v1.distributed.serde.async_processor"
logging.getLogger(TASKS).handlers[:] = [
    logging.NullHandler()
]  # tests make hundreds of tasks fail, and read the log

DIM, HEADS = 64, 2
FUSED, SPLIT = (1, 2, 128, HEADS * 2 * DIM), (2, 2, 128, HEADS * DIM)
LIMIT = 60.0  # seconds; nothing in these tests takes longer


def key_of(i, model="org/model"):
    return ObjectKey(
        chunk_hash=i.to_bytes(32, "little"), model_name=model, kv_rank=1 << 24 | 1 << 8
    )


def rows_of(i, shape=FUSED):
    """The rows of object i."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(torch.bfloat16)


def wait(done, what):
    end = time.monotonic() + LIMIT
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.005)


class Manager:
    """adapter: value of --l2-adapter. serde: options of kvant's serde; None: LMCache's raw
    bytes.
    """

    def __init__(self, adapter, serde=None):
        if serde is not None:
            adapter = adapter | {"serde": {"type": "kvant", "head_dim": DIM, "workers": 2} | serde}
        words = [
            *"--l1-size-gb 0.1 --eviction-policy LRU --l2-adapter".split(),
            json.dumps(adapter),
        ]
        arguments = add_storage_manager_args(argparse.ArgumentParser()).parse_args(words)
        self._manager = StorageManager(parse_args_to_config(arguments))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._manager.close()

    def store(self, keys, tensors, until=lambda: True):
        """Stores objects. LMCache's threads do the work; returns when until() is true."""
        desc = MemoryLayoutDesc(shapes=[tensors[0].shape], dtypes=[tensors[0].dtype])
        places = self._manager.reserve_write(keys, desc)
        for key, x in zip(keys, tensors):
            places[key].tensor.view(x.shape).copy_(x)
        self._manager.finish_write(keys)
        wait(until, "store")

    def forget(self):
        """Drops everything that is not in L2."""
        self._manager.clear(force=True)

    def load(self, keys, shape=FUSED, dtype=torch.bfloat16):
        """Loads objects from L2: a tensor for each key, or None if any key is missing."""
        self.forget()
        desc = MemoryLayoutDesc(shapes=[torch.Size(shape)], dtypes=[dtype])
        handle = self._manager.submit_prefetch_task(
            PrefetchTaskSpec([GroupedObjectKeys(keys, 0, desc)])
        )
        found = []
        wait(
            lambda: (
                found.append(self._manager.query_prefetch_status(handle)) or found[-1] is not None
            ),
            "load",
        )
        hits = found[-1].l2_hit_cells[0].popcount() if found[-1].l2_hit_cells else 0
        if hits < len(keys):
            return None
        with self._manager.read_prefetched_results(keys) as objects:
            made = [x.tensor.view(shape).clone() for x in objects]
        self._manager.finish_read_prefetched(keys)
        return made
