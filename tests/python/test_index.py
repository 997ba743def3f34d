"""kvant.Index: NumPy's own search beside it, files, filters, refusals."""

import pathlib
import tempfile
import unittest

from common import TestCase, normal, np

import kvant

DIM, N = 48, 300


class Index(TestCase):
    def setUp(self):
        self.rows, self.queries = normal(1, N, DIM), normal(2, 5, DIM)

    def filled(self, metric="ip", spec="turboquant-8", ids=None):
        index = kvant.Index(DIM, metric, spec)
        index.add(self.rows, ids)
        return index

    def exact(self, metric):
        rows, queries = self.rows.astype(np.float64), self.queries.astype(np.float64)
        products = queries @ rows.T
        if metric == "cosine":
            return products / np.linalg.norm(queries, axis=1)[:, None] / np.linalg.norm(rows, axis=1)
        return products if metric == "ip" else ((queries[:, None] - rows[None]) ** 2).sum(2)

    def test_scores_are_those_of_numpy(self):
        for metric in ("ip", "cosine", "l2"):
            scores, ids = self.filled(metric).search(self.queries, N)
            self.assertEqual((scores.dtype, ids.dtype), (np.float32, np.int64))
            exact = self.exact(metric)
            spread = exact.std()
            self.assertLess(np.abs(scores - np.take_along_axis(exact, ids, 1)).max(), 0.1 * spread)  # 8 bits: 1/60, and a tail
            self.assertTrue((np.sort(ids, 1) == np.arange(N)).all())

    def test_reranked_is_exact(self):
        for metric in ("ip", "cosine", "l2"):
            exact = self.exact(metric)
            order = np.argsort(exact if metric == "l2" else -exact, axis=1)[:, :7]
            index = self.filled(metric, "turboquant-1")
            scores, ids = index.search(self.queries, 7, rerank=N, originals=self.rows)
            np.testing.assert_array_equal(ids, order)
            np.testing.assert_allclose(scores, np.take_along_axis(exact, order, 1), rtol=1e-5)

    def test_filters(self):
        index = self.filled()
        _, all_ids = index.search(self.queries, N)
        for named, wanted in (
            (dict(allowed=np.array([3, 5, 200, 10**9])), {3, 5, 200}),
            (dict(allow=lambda id: id % 100 == 7), {7, 107, 207}),
            (dict(allowed=np.array([], np.int64)), set()),
        ):
            _, ids = index.search(self.queries, 4, **named)
            for found, every in zip(ids, all_ids):
                kept = [id for id in every if id in wanted]
                self.assertEqual(found.tolist(), kept + [-1] * (4 - len(kept)))

    def test_ids_and_removal(self):
        index = self.filled(ids=np.arange(N) * 10)
        index.remove(50)
        self.assertEqual((len(index), index.info.id_bytes), (N - 1, 8))
        self.refused(kvant.Error, "no vector has the id 50", index.remove, 50)
        self.refused(kvant.Error, "the id 60 is taken", index.add, self.rows[:1], np.array([60]))
        index.add(self.rows[:1])
        self.assertEqual(index.search(self.rows[:1], 2)[1][0].tolist(), [0, 10 * (N - 1) + 1])

    def test_files_come_back(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "a.kvidx"
            index = kvant.Index(DIM, "l2", "turboquant-3:dims=20")
            index.train(self.rows)
            index.add(self.rows)
            index.save(path)
            wanted = index.search(self.queries)
            for made in (kvant.Index.load(path), kvant.Index.view(path)):
                made.verify()
                for got, want in zip(made.search(self.queries), wanted):
                    np.testing.assert_array_equal(got, want)
                np.testing.assert_array_equal(made.reconstruct(4), index.reconstruct(4))
            self.assertEqual((made.info.spec, made.info.is_view), ("turboquant-3:dims=20", True))
            self.refused(kvant.Error, "view", made.add, self.rows)
            path.write_bytes(path.read_bytes()[:-1])
            self.refused(kvant.Error, "a.kvidx|cut short", kvant.Index.load, path)

    def test_refusals(self):
        index = self.filled()
        self.refused(ValueError, "metric|'dot'", kvant.Index, DIM, "dot")
        self.refused(kvant.Error, "turboquant-1, -2, -3, -4 or -8", kvant.Index, DIM, spec="int-4")
        self.refused(TypeError, "float32", index.add, self.rows.astype(np.float64))
        self.refused(ValueError, "[n, 48]", index.search, self.rows[:, :5])
        self.refused(ValueError, "ids: -1", index.add, self.rows[:1], np.array([-1]))
        self.refused(TypeError, "originals", index.search, self.queries, rerank=5)
        self.rows[3, 4] = np.nan
        self.refused(kvant.Error, "row 3", index.add, self.rows)


if __name__ == "__main__":
    unittest.main()
