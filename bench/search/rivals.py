"""What FAISS offers at the sizes of kvant's codes, behind the four calls that bench/search/compare.py makes.

    index = Faiss("RR,RaBitQ4", d)      a factory string; "RR," rotates, a "/qb=8" at its end sets what RaBitQ's queries are
                                        rounded to (0: not at all)
    index.train(rows), index.add(rows), index.search(queries, k, threads) -> ids, index.bytes (per vector, with factors)
"""

import faiss
import numpy as np

VERSION = faiss.__version__


class Faiss:
    def __init__(self, name, d, metric="ip", centroids=None, nprobe=None, rerank=0):
        factory, _, options = name.partition("/")
        text = factory.replace("RR,", f"RR{d},")
        self.name, self.system, self.rerank = name, f"faiss {VERSION}", rerank
        self.index = faiss.index_factory(d, text, {"ip": faiss.METRIC_INNER_PRODUCT, "l2": faiss.METRIC_L2}[metric])
        inner = self.inner()
        if centroids is not None:
            inner.quantizer.train(centroids)
            inner.quantizer.add(centroids)
        for option in filter(None, options.split("/")):
            key, value = option.split("=")
            setattr(inner, key, int(value))
        self.set_nprobe(nprobe)
        self.raw = None

    def inner(self):
        index = faiss.downcast_index(self.index)
        return faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index

    def set_nprobe(self, nprobe):
        self.nprobe = nprobe
        if nprobe:
            self.inner().nprobe = nprobe

    @property
    def bytes(self):
        """Codes and factors. A list of an IVF stores an id per vector besides, here and elsewhere: not counted."""
        inner = self.inner()
        return inner.code_size if hasattr(inner, "code_size") else inner.sa_code_size()

    def train(self, rows, threads=1):
        faiss.omp_set_num_threads(threads)
        self.index.train(rows)

    def add(self, rows, threads=1):
        faiss.omp_set_num_threads(threads)
        self.index.add(rows)
        if self.rerank:
            self.raw = rows

    def search(self, queries, k, threads=1):
        faiss.omp_set_num_threads(threads)
        _, found = self.index.search(queries, max(k, self.rerank))
        return best_of(self.raw, queries, found, k) if self.rerank else found


def best_of(raw, queries, found, k):
    """The k best of found by exact products."""
    scores = np.einsum("qd,qnd->qn", queries, raw[np.maximum(found, 0)])
    scores[found < 0] = -np.inf
    return np.take_along_axis(found, np.argsort(-scores, axis=1)[:, :k], 1)


def centroids(rows, n, seed=7):
    """k-means of FAISS, once per set: every IVF index gets the same."""
    kmeans = faiss.Kmeans(rows.shape[1], n, niter=20, seed=seed, spherical=True)
    kmeans.train(rows)
    return kmeans.centroids
