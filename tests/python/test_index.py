"""Search on compressed vectors: errors of scores, ids, filters, files."""

import ctypes
import os
import pathlib
import tempfile
import threading
import unittest

from common import TestCase, normal, np

import kvant
from kvant import library

DIM, N = 96, 300


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def filled(spec="turboquant-8", metric="ip", n=N, **named):
    index, rows = kvant.Index(DIM, metric, spec, **named), normal(1, n, DIM)
    index.add(rows)
    return index, rows


def best(scores, k):
    """Ids of the k largest numbers of each row."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


class Estimates(TestCase):
    """Errors of <q, x> against their closed form. A unit vector x is rounded by Lloyd-Max codes to
    y, with <x, y> = |y|^2 = 1 - D. The vector y / (1 - D) has an error of length sqrt(D / (1 - D)),
    at right angles to x. For an independent q of unit length in d dimensions, the product with the
    error has that deviation over sqrt(d). D of N(0, 1): Max 1960, Table I. A uniform 8-bit
    quantiser adds little.
    """

    DISTORTION = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}

    def test_errors_are_those_of_lloyd_max_with_a_factor(self):
        d, rows, queries = 512, unit(normal(2, 2000, 512)), unit(normal(3, 100, 512))
        exact = queries @ rows.T
        for bits, distortion in self.DISTORTION.items():
            index = kvant.Index(d, spec=f"turboquant-{bits}")
            index.add(rows)
            scores, ids = index.search(queries, len(rows))
            truth = np.take_along_axis(exact, ids, 1)
            error = np.sqrt(np.mean((scores - truth) ** 2) * d)
            expected = np.sqrt(distortion / (1 - distortion))
            # The 200,000 products of 100 queries know the error within 2 %. Queries of 8 bits add
            # (max / 127)^2 / 12 per number, with max / deviation of 512 numbers about 3.1. That is
            # 0.7 % of a deviation, which shows only at 4 bits.
            self.assertLess(
                abs(error / np.hypot(expected, 3.1 / 127 / np.sqrt(12)) - 1), 0.03, bits
            )
            slope = np.sum(scores * truth) / np.sum(truth * truth)
            self.assertLess(
                abs(slope - 1), 4 * expected / np.sqrt(truth.size), bits
            )  # unbiased: four deviations

    def test_scores_are_products_with_reconstructed_vectors(self):
        index, _ = filled("turboquant-4")
        query = normal(4, 1, DIM)
        scores, ids = index.search(query, N)
        products = np.array([query[0] @ index.reconstruct(int(i)) for i in ids[0]])
        # The query is rounded to integers up to 127: half a step in each of 96 numbers, with a
        # random sign.
        step = (
            np.abs(query).max() * 2 / 127
        )  # the rotated query's largest number is at most twice as large (seed of this test)
        bound = (
            5
            * step
            / np.sqrt(12)
            * np.linalg.norm([index.reconstruct(i) for i in range(20)], axis=1).max()
        )
        self.assertLess(np.abs(scores[0] - products).max(), bound)
        self.assertTrue((np.diff(scores[0]) <= 0).all())

    def test_no_query_is_too_short_or_too_long(self):
        index, _ = filled("turboquant-2")
        queries = normal(5, 20, DIM)
        scores, ids = index.search(queries, 10)
        for power in (-90, -30, 40):
            found = index.search(np.ldexp(queries, power), 10)
            np.testing.assert_array_equal(found[1], ids)
            np.testing.assert_array_equal(found[0], np.ldexp(scores, power))


class Search(TestCase):
    def test_metrics(self):
        queries = normal(6, 50, DIM)
        for metric, exact in (
            ("ip", lambda rows: queries @ rows.T),
            ("cosine", lambda rows: unit(queries) @ unit(rows).T),
            ("l2", lambda rows: -np.square(queries[:, None] - rows).sum(2)),
        ):
            index, rows = filled(metric=metric)
            scores, ids = index.search(queries, 10)
            self.assertEqual(
                (scores.dtype, ids.dtype, scores.shape), (np.float32, np.int64, (50, 10))
            )
            same = np.mean([len(set(a) & set(b)) for a, b in zip(ids, best(exact(rows), 10))]) / 10
            self.assertGreater(same, 0.95, metric)  # 8 bits
            sign = -1 if metric == "l2" else 1
            self.assertTrue((np.diff(sign * scores) <= 0).all(), metric)
            close = np.take_along_axis(exact(rows), ids, 1)
            spread = exact(rows).std()
            self.assertLess(np.abs(sign * scores - close).max(), 0.1 * spread, metric)

    def test_a_shared_direction(self):
        """All vectors lie close together, far from 0. A centre makes them distinguishable again."""
        rows, queries = normal(7, 500, DIM) + 10, normal(8, 50, DIM)
        truth = best(-np.square(queries[:, None] + 10 - rows).sum(2), 10)

        def hits(index):
            index.add(rows)
            return np.mean(
                [len(set(a) & set(b)) for a, b in zip(index.search(queries + 10, 10)[1], truth)]
            )

        plain, trained = kvant.Index(DIM, metric="l2"), kvant.Index(DIM, metric="l2")
        trained.train(rows[:200])
        given = kvant.Index(DIM, metric="l2", center=rows.mean(0))
        self.assertGreater(hits(trained), hits(plain) + 2)
        self.assertGreater(hits(given), 7)
        self.assertTrue(given.info.has_center)
        self.refused(kvant.Error, "empty", trained.train, rows)

    def test_threads_batches_and_strides_change_nothing(self):
        index, _ = filled("turboquant-4", n=5000)
        queries = normal(9, 70, 2 * DIM)[:, :DIM]
        scores, ids = index.search(queries, 7, n_threads=1)
        parts = [index.search(np.ascontiguousarray(q[None]), 7, n_threads=3) for q in queries]
        np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), scores)
        np.testing.assert_array_equal(np.concatenate([part[1] for part in parts]), ids)

    def test_lists(self):
        """All lists together are the whole index. Few lists find the near vectors of clustered
        vectors.
        """
        centres = 3 * normal(20, 16, DIM)
        rows = centres[np.arange(2000) % 16] + normal(21, 2000, DIM)
        queries = centres[np.arange(40) % 16] + normal(22, 40, DIM)
        truth = best(-np.square(queries[:, None] - rows).sum(2), 10)
        index = kvant.Index(DIM, "l2", "turboquant-8:lists=16")
        self.refused(kvant.Error, "train", index.add, rows)
        index.train(rows)
        index.add(rows)
        self.assertEqual(index.info.n_lists, 16)
        found = {n: index.search(queries, 10, n_probe=n)[1] for n in (1, 4, 16)}
        hits = {
            n: np.mean([len(set(a) & set(b)) for a, b in zip(ids, truth)])
            for n, ids in found.items()
        }
        self.assertGreater(hits[16], 9)  # of 10, at 8 bits
        self.assertGreater(hits[4], 0.9 * hits[16])
        self.assertGreaterEqual(hits[16], hits[4])
        self.assertGreaterEqual(hits[4], hits[1])
        np.testing.assert_array_equal(index.search(queries, 10, n_probe=1000)[1], found[16])
        np.testing.assert_array_equal(index.search(queries, 10, n_probe=2**31 - 1)[1], found[16])
        self.assertEqual(index.remove_ids(np.arange(0, 2000, 2)), 1000)
        self.assertTrue((index.search(queries, 10, n_probe=16)[1] % 2 == 1).all())

    def test_given_centroids(self):
        centres = 3 * normal(20, 16, DIM)
        rows = centres[np.arange(2000) % 16] + normal(21, 2000, DIM)
        truth = best(-np.square(rows[:40, None] - rows).sum(2), 10)
        index = kvant.Index(DIM, "l2", "trellis-4:lists=16,rows=int8", centroids=centres)
        index.add(rows)  # without training
        ids = index.search(rows[:40], 10, rerank=50, n_probe=16)[1]
        self.assertGreater(np.mean([len(set(a) & set(b)) for a, b in zip(ids, truth)]), 9)
        self.refused(kvant.Error, "lists=16", kvant.Index, DIM, centroids=centres)
        self.refused(
            kvant.Error,
            "15 centroids",
            kvant.Index,
            DIM,
            "l2",
            "trellis-4:lists=16",
            centroids=centres[1:],
        )
        self.refused(
            ValueError,
            "centroids",
            kvant.Index,
            DIM,
            "l2",
            "trellis-4:lists=16",
            centroids=centres[:, 1:],
        )

    def test_many_threads_search_at_once(self):
        index, _ = filled(n=2000)
        queries, found = normal(10, 20, DIM), [None] * 8
        expected = index.search(queries, 5)

        def work(i):
            found[i] = index.search(queries, 5, n_threads=1)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for scores, ids in found:
            np.testing.assert_array_equal(ids, expected[1])
            np.testing.assert_array_equal(scores, expected[0])

    def test_fewer_than_k(self):
        index, _ = filled(n=3)
        scores, ids = index.search(normal(11, 2, DIM), 5)
        self.assertTrue((ids[:, 3:] == -1).all() and np.isneginf(scores[:, 3:]).all())
        self.assertEqual(sorted(ids[0, :3]), [0, 1, 2])
        self.assertEqual(kvant.Index(DIM).search(normal(11, 0, DIM), 5)[1].shape, (0, 5))
        self.assertTrue((kvant.Index(DIM).search(normal(11, 2, DIM), 5)[1] == -1).all())

    def test_rerank_gives_exact_scores(self):
        queries = normal(12, 30, DIM)
        for metric, exact in (
            ("ip", lambda rows: queries @ rows.T),
            ("cosine", lambda rows: unit(queries) @ unit(rows).T),
            ("l2", lambda rows: -np.square(queries[:, None] - rows).sum(2)),
        ):
            index, rows = filled("turboquant-2", metric)
            truth = best(exact(rows), 10)
            wide = np.concatenate([rows, rows], axis=1)[:, :DIM]  # with another stride
            for originals in (rows, wide):
                scores, ids = index.search(queries, 10, rerank=N, originals=originals)
                np.testing.assert_array_equal(ids, truth)
                expected = np.take_along_axis(exact(rows), ids, 1)
                np.testing.assert_allclose(np.abs(scores), np.abs(expected), rtol=1e-4, atol=1e-5)
        self.refused(kvant.Error, "rerank", index.search, queries, rerank=20)


class Ids(TestCase):
    def test_add_remove_and_go_on(self):
        index, rows = filled()
        self.assertEqual((len(index), index.ntotal), (N, N))
        self.assertEqual(index.remove_ids(np.array([5, 7, 5, 10_000])), 2)
        self.assertEqual(len(index), N - 2)
        found = index.search(rows, 1)[1][:, 0]
        self.assertFalse({5, 7} & set(found.tolist()))
        index.add(rows[:1])
        index.add_with_ids(rows[1:2], np.array([7]))
        self.assertEqual(index.search(rows[7:8], N)[1][0].tolist().count(7), 1)
        self.assertIn(N, index.search(rows[:1], N)[1][0])
        np.testing.assert_array_equal(index.reconstruct(N), index.reconstruct(0))
        self.refused(kvant.Error, "no vector of the index has the id 5", index.reconstruct, 5)
        error = self.refused(kvant.Error, "add: ", index.add_with_ids, rows[:2], np.array([900, 7]))
        self.assertEqual((error.status, len(index)), (10, N))  # neither was added
        self.refused(kvant.Error, "add: ", index.add_with_ids, rows[:2], np.array([901, 901]))

    def test_order_of_adding_changes_nothing(self):
        index, rows = filled("turboquant-4")
        order = np.random.default_rng(1).permutation(N)
        other = kvant.Index(DIM, spec="turboquant-4")
        other.add_with_ids(rows[order], order)
        for mine, its in zip(index.search(rows, 20), other.search(rows, 20)):
            np.testing.assert_array_equal(mine, its)

    def test_filters(self):
        index, rows = filled()
        allowed = np.array([3, 50, 3, 299, 1000])
        scores, ids = index.search(rows[:4], 5, allowed=allowed)
        self.assertTrue(all(set(row) == {3, 50, 299, -1} for row in ids.tolist()))
        self.assertTrue((index.search(rows[:4], 5, allowed=allowed[:0])[1] == -1).all())
        even = index.search(rows[:4], 5, allow=lambda i: i % 2 == 0)[1]
        np.testing.assert_array_equal(
            even, index.search(rows[:4], 5, allowed=np.arange(0, N, 2))[1]
        )
        both = index.search(rows[:1], 5, allowed=allowed, allow=lambda i: i > 3)[1]
        self.assertEqual(set(both[0].tolist()), {50, 299, -1})

        def fails(_):
            raise KeyError("no such")

        self.refused(KeyError, "no such", index.search, rows[:1], 5, allow=fails)


class Files(TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "a.kvindex"

    def test_save_load_and_view(self):
        for metric, spec in (("ip", "turboquant-4"), ("l2", "turboquant-3:dims=50")):
            rows, index = normal(1, N, DIM), kvant.Index(DIM, metric, spec)
            index.train(rows)
            index.add(rows)
            index.remove_ids(np.array([1]))
            index.save(self.path)
            self.assertEqual(self.path.stat().st_size, index.info.file_bytes)
            expected = index.search(rows, 5)
            for again in (kvant.Index.load(self.path), kvant.Index.view(self.path)):
                again.verify()
                self.assertEqual((again.dim, again.metric, len(again)), (DIM, metric, N - 1))
                for a, b in zip(again.search(rows, 5), expected):
                    np.testing.assert_array_equal(a, b)
            self.assertTrue(again.info.is_view)
            self.refused(kvant.Error, "add: ", again.add, rows)
            del again

    def test_damage_is_found(self):
        filled()[0].save(self.path)
        data = bytearray(self.path.read_bytes())
        for at in np.random.default_rng(2).integers(0, 8 * len(data), 100).tolist():
            damaged = bytearray(data)
            damaged[at // 8] ^= 1 << at % 8
            self.path.write_bytes(damaged)
            self.refused(kvant.Error, "a.kvindex", kvant.Index.load, self.path)
        self.path.write_bytes(data[: len(data) // 2])
        self.refused(kvant.Error, "a.kvindex", kvant.Index.load, self.path)
        self.refused(kvant.Error, "a.kvindex", kvant.Index.view, self.path)
        self.refused(kvant.Error, "nowhere", kvant.Index.load, self.path.parent / "nowhere")


class Refusals(TestCase):
    def test_arguments(self):
        index, rows = filled()
        self.refused(TypeError, "rows: float32", index.add, rows.astype(np.float64))
        self.refused(ValueError, "rows: |[n, 96]", index.add, rows[:, :-1])
        self.refused(ValueError, "queries: ", index.search, rows[0], 5)
        self.refused(
            TypeError, "ids: int64", index.add_with_ids, rows, np.arange(N, dtype=np.int32)
        )
        self.refused(ValueError, "ids: ", index.add_with_ids, rows, np.arange(N - 1))
        self.refused(ValueError, "ids: -1", index.remove_ids, np.array([-1]))
        self.refused(ValueError, "k: 0", index.search, rows, 0)
        self.refused(ValueError, "metric: 'dot'", kvant.Index, DIM, "dot")
        self.refused(kvant.Error, "turboquant-99", kvant.Index, DIM, "ip", "turboquant-99")
        self.refused(ValueError, "dim", kvant.Index, 0)
        nan = rows.copy()
        nan[7, 3] = np.nan
        self.assertEqual(self.refused(kvant.Error, "add: ", index.add, nan).status, 50)
        self.assertEqual(self.refused(kvant.Error, "search: ", index.search, nan, 5).status, 50)
        self.assertEqual(len(index), N)

    def test_ids_are_int64(self):
        """An id beyond int64 would come back as a negative id, which no call accepts."""
        most, (row, other) = 2**63 - 1, normal(3, 2, DIM)[:, None]
        index = kvant.Index(DIM)
        self.refused(ValueError, "ids: -1", index.add_with_ids, row, np.array([-1]))
        index.add_with_ids(row, np.array([most - 1]))
        self.assertEqual(index.info.next_id, most)
        self.refused(ValueError, f"rows: |{most}", index.add, np.concatenate((row, other)))
        index.add(other)
        self.refused(ValueError, f"rows: |{most}|add_with_ids", index.add, row)
        index.add_with_ids(row, np.array([3]))
        self.assertEqual(sorted(index.search(row, 5)[1][0].tolist()), [-1, -1, 3, most - 1, most])
        self.assertEqual(index.remove_ids(np.array([most, most - 1, 3])), 3)

    def test_files_with_larger_ids(self):
        """An id that only programs in C can make."""
        index, row = kvant.Index(DIM), normal(3, 1, DIM)
        number, add = ctypes.byref(ctypes.c_uint64(2**63)), library.library().kvant_index_add
        self.assertEqual(add(index._handle, row.ctypes.data, DIM, 1, number, 1), 0)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "large.kvindex"
            index.save(path)
            for opens in (kvant.Index.load, kvant.Index.view):
                self.refused(ValueError, f"large.kvindex|{2**63 - 1}", opens, path)

    def test_words_are_of_the_call(self):
        """The error says that there are no training rows, and does not repeat an older failure."""
        index, rows = kvant.Index(DIM, spec="turboquant-4:lists=2"), normal(4, 8, DIM)
        nan = rows.copy()
        nan[0, 0] = np.nan
        self.refused(kvant.Error, "NaN", index.train, nan)
        self.refused(ValueError, "rows: there are no rows", index.train, rows[:0])
        self.refused(kvant.Error, "NaN", index.train, nan)
        self.assertNotIn("NaN", str(self.refused(kvant.Error, "train", index.add, rows)))

    def test_what_it_says_of_itself(self):
        index, _ = filled("turboquant-2")
        info = index.info
        self.assertEqual(
            (info.dim, info.metric, info.bits, info.n, info.is_view), (DIM, "ip", 2, N, False)
        )
        self.assertEqual(info.bytes_per_vector, DIM * 2 // 8 + 4)
        self.assertEqual(
            repr(index), f"<kvant.Index of {N} vectors, {DIM} numbers each, turboquant-2, ip>"
        )


@unittest.skipUnless(
    os.environ.get("KVANT_CUDA_LIBRARY"), "needs the library for GPUs, or its mock"
)
class OnAGpu(TestCase):
    """On the mock of tests/cuda, or on the library that KVANT_CUDA_LIBRARY names."""

    def test_results_are_those_of_the_cpu_after_every_change(self):
        index, rows = filled("turboquant-3", "l2", device="cuda")
        twin, _ = filled("turboquant-3", "l2")
        changes = (
            lambda i: None,
            lambda i: i.remove_ids(np.arange(0, N, 3)),
            lambda i: i.add(rows[:50] + 1),
        )
        for change in changes:
            for each in (index, twin):
                change(each)
            for ours, theirs in zip(index.search(rows[:40], 7), twin.search(rows[:40], 7)):
                np.testing.assert_array_equal(ours, theirs)

    def test_files_go_there(self):
        index, rows = filled()
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "a.kvindex"
            index.save(path)
            for opened in (
                kvant.Index.view(path, device="cuda"),
                kvant.Index.load(path, device="cuda"),
            ):
                np.testing.assert_array_equal(
                    opened.search(rows[:3], 5)[1], index.search(rows[:3], 5)[1]
                )

    def test_refusals(self):
        index, rows = filled(device="cuda")
        self.refused(ValueError, "device: 'gpu'", kvant.Index, DIM, device="gpu")
        lists = kvant.Index(DIM, spec="turboquant-4:lists=4", device="cuda")
        lists.train(rows)
        lists.add(rows)
        self.refused(kvant.Error, "lists=", lists.search, rows, 5)


if __name__ == "__main__":
    unittest.main()
