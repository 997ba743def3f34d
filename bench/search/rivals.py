"""FAISS's indexes at the sizes of kvant's codes, with the four calls that bench/search/compare.py
makes.

    index = Faiss("RR,RaBitQ4/qb=8", d)     a factory string; "RR," rotates, RaBitQ's queries are
                                            rounded to the bits of "/qb=8"
    index = Faiss("PCAR256,EDEN3/l2", d)    by distance: rows and queries of length 1 have the same
                                            neighbours by products, and FAISS's projections subtract
                                            a mean, after which products mean nothing
    index.train(rows), index.add(rows), index.search(queries, k, threads) -> ids,
    index.bytes (per vector, with factors)
"""

import faiss

VERSION = faiss.__version__


class Faiss:
    def __init__(self, name, d, centroids=None):
        factory, *options = name.split("/")
        self.name, self.system = name, f"faiss {VERSION}"
        metric = faiss.METRIC_L2 if "l2" in options else faiss.METRIC_INNER_PRODUCT
        self.index = faiss.index_factory(d, factory.replace("RR,", f"RR{d},"), metric)
        inner = self.inner()
        if centroids is not None:
            inner.quantizer.train(centroids)
            inner.quantizer.add(centroids)
        for key, value in (option.split("=") for option in options if "=" in option):
            setattr(inner, key, int(value))
        self.refine, self.rerank = None, 0

    def inner(self):
        index = faiss.downcast_index(self.index)
        return (
            faiss.downcast_index(index.index)
            if isinstance(index, faiss.IndexPreTransform)
            else index
        )

    def configure(self, nprobe, rerank):
        """Sets an IVF's number of lists to search, and of candidates that get exact products."""
        self.rerank = rerank
        if nprobe:
            self.inner().nprobe = nprobe

    @property
    def bytes(self):
        """Codes and factors. A list of an IVF also stores an id per vector, here and elsewhere; it
        is not counted."""
        inner = self.inner()
        return inner.code_size if hasattr(inner, "code_size") else inner.sa_code_size()

    def train(self, rows, threads=1):
        faiss.omp_set_num_threads(threads)
        self.index.train(rows)

    def add(self, rows, threads=1):
        faiss.omp_set_num_threads(threads)
        self.index.add(rows)

    def keep(self, rows):
        """Rows that were added, for rerank: FAISS copies them."""
        self.refine = faiss.IndexRefineFlat(self.index, faiss.swig_ptr(rows))

    def search(self, queries, k, threads=1):
        faiss.omp_set_num_threads(threads)
        if not self.rerank:
            return self.index.search(queries, k)[1]
        self.refine.k_factor = self.rerank / k
        return self.refine.search(queries, k)[1]


def centroids(rows, n, seed=7):
    """k-means of FAISS, once per set: every IVF index gets the same."""
    kmeans = faiss.Kmeans(rows.shape[1], n, niter=20, seed=seed, spherical=True)
    kmeans.train(rows)
    return kmeans.centroids
