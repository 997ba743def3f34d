"""kvant for ann-benchmarks: copy this folder to ann_benchmarks/algorithms/kvant there.

python3 run.py --algorithm kvant --dataset glove-200-angular
"""

import kvant
import numpy as np

from ..base.module import BaseANN

METRICS = {"angular": "cosine", "euclidean": "l2"}


class Kvant(BaseANN):
    """A flat index; rerank 0 searches codes alone, and keeps no rows."""

    def __init__(self, metric, spec):
        self.metric, self.spec, self.rerank, self.rows = METRICS[metric], spec, 0, None
        self.index = self.found = None

    def fit(self, X):
        rows = np.ascontiguousarray(X, dtype=np.float32)
        self.index = kvant.Index(rows.shape[1], self.metric, self.spec)
        self.index.train(rows[:100_000])
        self.index.add(rows)
        self.rows = rows

    def set_query_arguments(self, rerank):
        self.rerank = rerank

    def search(self, X, n, n_threads):
        queries = np.ascontiguousarray(X, dtype=np.float32)
        rerank = {"rerank": self.rerank, "originals": self.rows} if self.rerank else {}
        return self.index.search(queries, n, n_threads=n_threads, **rerank)[1]

    def query(self, q, n):
        return self.search(q[None], n, 1)[0]

    def batch_query(self, X, n):
        self.found = self.search(X, n, None)

    def get_batch_results(self):
        return [ids[ids >= 0] for ids in self.found]

    def get_additional(self):
        return {"bytes_per_vector": self.index.info.bytes_per_vector}

    def __str__(self):
        return f"kvant({self.spec}, rerank={self.rerank})"
