"""transform=first in Python: a cache that sees queries before their keys learns how to store keys,
and exported blocks contain the transform. The same with tensors.
"""

import unittest

from common import TestCase, normal, np

import kvant

HEADS, KV_HEADS, DIM, N = 6, 2, 32, 2040
SHAPE = dict(n_layers=1, n_heads=HEADS, n_kv_heads=KV_HEADS, head_dim=DIM, max_tokens=2048)
SPEC, PLAIN = "trellis-4:transform=first", "trellis-4:center=first,norm=first"


def text(seed, n=N, dim=DIM):
    """Keys around a centre, values and queries. Channels of keys and of queries are correlated:
    latent numbers of falling size, multiplied by matrices of the seed.
    """
    falling = np.exp2(-6.4 / dim * np.arange(dim, dtype=np.float32))
    mixes = normal(seed, 2, dim, dim) * falling
    k = normal(seed + 1, n, KV_HEADS, dim) @ mixes[0].T + 20 * normal(seed + 2, KV_HEADS, dim)
    return k, normal(seed + 3, n, KV_HEADS, dim), normal(seed + 4, n, HEADS, dim) @ mixes[1].T


def made(k=SPEC, **options):
    cache = kvant.Cache(**SHAPE | options, k=k, v="trellis-4")
    return cache, cache.new_sequence()


def put(cache, sequence, rows, parts=(0, 400, 1100, N), note=True):
    k, v, q = rows
    for first, end in zip(parts, parts[1:]):
        if note:
            cache.note_queries(0, q[first:end])
        cache.append(0, sequence, k[first:end], v[first:end])


def error(cache, sequence, rows, first, end):
    """Root mean square error of the scores of the tokens' stored keys with queries of other
    tokens.
    """
    k, _, q = rows
    wrong = (cache.read(0, sequence)[0] - k)[first:end]
    asked = q[np.arange(first, end) * 7 % len(q)]
    scores = np.einsum("nghd,ngd->ngh", asked.reshape(-1, KV_HEADS, HEADS // KV_HEADS, DIM), wrong)
    return float(np.sqrt(np.square(scores).mean()))


class Caches(TestCase):
    def test_scores_err_less_than_with_factors(self):
        """The cache learns from the first keys on if their queries come before them. The first 64
        tokens are fp16.
        """
        rows, caches = text(1), [made(), made(PLAIN)]
        for cache in caches:
            put(*cache, rows)
        for first, end in ((64, 400), (1100, N)):
            learnt, plain = (error(*cache, rows, first, end) for cache in caches)
            self.assertLess(learnt, 0.7 * plain, first)

    def test_queries_before_keys_serve_the_first_keys(self):
        """Without note_queries, queries of attend() count only for later keys."""
        rows = text(1)
        noted, late, never = made(), made(), made()
        put(*noted, rows)
        put(*never, rows, note=False)
        for first, end in ((0, 400), (400, 1100), (1100, N)):
            late[0].append(0, late[1], *(x[first:end] for x in rows[:2]))
            late[0].attend(0, late[1], rows[2][first:end])
        first, later = (
            [error(*cache, rows, *part) for cache in (noted, late, never)]
            for part in ((64, 400), (1100, N))
        )
        self.assertLess(first[0], 0.7 * first[1])
        self.assertEqual(first[1], first[2])
        self.assertLess(later[1], 0.7 * later[2])

    def test_one_call_with_a_hostile_beginning(self):
        """The first 600 tokens of a prompt are one repeated token. The remaining tokens are stored
        as well as they are alone.
        """
        rows, alone = text(1), made()
        put(*alone, [x[700:] for x in rows], (0, N - 700))
        hostile = made()
        k, v, q = (x.copy() for x in rows)
        k[:600], q[:600] = k[:1], q[:1]
        put(*hostile, (k, v, q), (0, N))
        wanted = error(*alone, [x[700:] for x in rows], 324, 700)
        self.assertLess(error(*hostile, (k, v, q), 1024, N), 1.2 * wanted)

    def test_exact_rows_stay_exact(self):
        rows, (cache, sequence) = text(1), made("f32")
        put(cache, sequence, rows)
        self.assertTrue(np.array_equal(cache.read(0, sequence)[0], rows[0]))

    def test_exported_blocks_are_the_same_cache(self):
        """Centre, scale and matrix of every transform move with their blocks: rows, and exports of
        the copy, are equal.
        """
        rows, (cache, sequence), (other, there) = text(1), made(), made()
        n = N - N % 64
        put(cache, sequence, [x[:n] for x in rows], (0, 400, 1100, n))
        blocks = [cache.export_blocks(sequence, i) for i in range(n // 64)]
        for block in blocks:
            other.import_blocks(there, block)
        for mine, theirs in zip(cache.read(0, sequence), other.read(0, there)):
            self.assertTrue(np.array_equal(mine, theirs))
        self.assertEqual([other.export_blocks(there, i) for i in range(n // 64)], blocks)
        q = normal(5, 3, HEADS, DIM)
        self.assertTrue(np.array_equal(other.attend(0, there, q), cache.attend(0, sequence, q)))
        self.assertGreater(
            len({len(block) for block in blocks}), 1
        )  # fp16 rows of the first block, matrices of later blocks

    def test_forks_and_truncation(self):
        """Transforms belong to blocks, not to sequences."""
        rows, (cache, sequence) = text(1), made(max_sequences=2)
        put(cache, sequence, rows, (0, 400, 1100))
        before = cache.read(0, sequence)[0][:960]  # whole blocks
        fork = cache.fork(sequence)
        cache.truncate(sequence, 960)
        put(cache, sequence, text(50), (0, 300))
        for number in (sequence, fork):
            self.assertTrue(np.array_equal(cache.read(0, number, 0, 960)[0], before))

    def test_what_is_asked_for(self):
        rows, (cache, sequence), (plain, _) = text(1), made(), made(PLAIN)
        self.assertEqual([x.wants_queries(0) for x in (cache, plain)], [True, False])
        self.assertFalse(cache.wants_queries(0, 0))
        put(cache, sequence, rows)
        self.assertEqual([cache.wants_queries(0, n) for n in (1, 63, 64)], [False, False, True])
        preset = kvant.Cache(**SHAPE)
        self.assertTrue(preset.wants_queries(0))
        self.assertIn("transform=first", preset.info.k)

    def test_views_and_refusals(self):
        rows, (cache, sequence), (other, there) = text(1), made(), made()
        wide = np.zeros((N, HEADS, 2, DIM), np.float32)
        wide[:, :, 0] = rows[2]
        put(cache, sequence, rows, (0, 400))
        put(other, there, (*rows[:2], wide[:, :, 0]), (0, 400))
        self.assertTrue(np.array_equal(cache.read(0, sequence)[0], other.read(0, there)[0]))
        q = rows[2][:4]
        for kind, words, layer, bad in (
            (ValueError, "q: ", 0, q[:, :4]),
            (TypeError, "q: |float64", 0, q.astype(np.float64)),
            (ValueError, "layer: 1", 1, q),
        ):
            self.refused(kind, words, cache.note_queries, layer, bad)
        self.refused(ValueError, "n: -1", cache.wants_queries, 0, -1)
        cache.close()
        self.refused(ValueError, "closed", cache.note_queries, 0, q)


FREQUENCIES = 1e5 ** (-np.arange(DIM // 2) / (DIM // 2))  # radians per position


def turned(rows, interleaved=False):
    """Rotates each row by RoPE to its position, in all heads."""
    angles = np.outer(np.arange(len(rows)), FREQUENCIES)[:, None]
    first, second = (
        (np.s_[..., ::2], np.s_[..., 1::2])
        if interleaved
        else (np.s_[..., : DIM // 2], np.s_[..., DIM // 2 :])
    )
    out, x, y = np.empty_like(rows), rows[first], rows[second]
    out[first] = x * np.cos(angles) - y * np.sin(angles)
    out[second] = x * np.sin(angles) + y * np.cos(angles)
    return out


class Ropes(TestCase):
    """Keys and queries that RoPE rotates. A cache learns only from the first 1024 tokens, and later
    tokens need a matrix that knows RoPE.
    """

    LONG = 8192

    def errors(self, rope, interleaved=False, noted=1024):
        """Errors of the first keys and of late keys. noted: number of tokens whose queries are
        noted with their positions.
        """
        k, v, q = text(1, self.LONG)
        rows = (turned(k, interleaved), v, turned(q, interleaved))
        numbers = np.arange(self.LONG, dtype=np.int32)
        cache, sequence = made(max_tokens=self.LONG)
        if rope is not None:
            cache.set_rope(0, rope)
        for first in range(0, self.LONG, 512):
            part = np.s_[first : first + 512]
            if first < noted:
                cache.note_queries(0, rows[2][part], numbers[part])
            cache.append(0, sequence, rows[0][part], v[part])
        return [error(cache, sequence, rows, *part) for part in ((64, 1024), (4096, self.LONG))]

    def test_late_keys(self):
        """Without RoPE, late keys lose most of a matrix's effect. With RoPE they lose about
        nothing, and with one matrix for all positions they lose something everywhere.
        """
        (first, late), (first_without, late_without) = (
            self.errors(kvant.Rope(FREQUENCIES)),
            self.errors(None),
        )
        self.assertGreater(late_without, 2 * first_without)
        self.assertLess(first, 1.1 * first_without)
        self.assertLess(late, 1.4 * first)
        self.assertLess(self.errors(kvant.Rope(FREQUENCIES), noted=self.LONG)[1], 1.4 * first)
        one = self.errors(kvant.Rope(FREQUENCIES, n_position_transforms=1))
        self.assertLess(max(one), 1.6 * first_without)

    def test_pairs(self):
        frequencies = list(FREQUENCIES)
        for interleaved in False, True:
            right, wrong = (
                self.errors(kvant.Rope(frequencies, pairs), interleaved)[1]
                for pairs in (interleaved, not interleaved)
            )
            self.assertLess(right, 0.9 * wrong)

    def test_refusals(self):
        cache, _ = made()
        for kind, words, bad in (
            (ValueError, "frequencies", kvant.Rope(FREQUENCIES[None])),
            (ValueError, "n_positions", kvant.Rope(FREQUENCIES, n_positions=-1)),
            (kvant.Error, "n_dims", kvant.Rope(np.ones(DIM // 2 + 1))),
            (kvant.Error, "frequency 1 ", kvant.Rope([1.0, np.nan])),
        ):
            self.refused(kind, words, cache.set_rope, 0, bad)
        self.refused(
            ValueError, "positions", cache.note_queries, 0, text(1, 8)[2], np.zeros(7, np.int32)
        )
        cache.set_rope(0, None)


class Tensors(TestCase):
    def test_they_learn_as_a_cache_does(self):
        rows, (cache, sequence) = text(1), made()
        scheme = kvant.Scheme(k=SPEC, v="trellis-4", n_layers=1, n_kv_heads=KV_HEADS, head_dim=DIM)
        tensor = kvant.Tensor(scheme.codecs(0, "k"), n_blocks=32)
        self.assertTrue(tensor.wants_queries())
        for first, end in ((0, 400), (400, 900), (900, 1400), (1400, 1900), (1900, N)):
            put(cache, sequence, rows, (first, end))
            tensor.note_queries(rows[2][first:end])
            tensor.write(np.arange(first, end), rows[0][first:end])
        self.assertTrue(np.array_equal(tensor.read(0, N), cache.read(0, sequence)[0]))
        self.assertGreater(tensor.info.n_transforms, 1)
        self.assertFalse(tensor.wants_queries())
        tensor.set_rope(kvant.Rope(FREQUENCIES))
        self.refused(ValueError, "q: ", tensor.note_queries, rows[2][:, :, :31])

    def test_blocks_have_centers(self):
        rows = text(1)
        scheme = kvant.Scheme(k=SPEC, v="trellis-4", n_layers=1, n_kv_heads=KV_HEADS, head_dim=DIM)
        for turned in (False, True):
            tensor = kvant.Tensor(scheme.codecs(0, "k"), n_blocks=8)
            tensor.set_rope(kvant.Rope(FREQUENCIES, block_centers=turned))
            tensor.note_queries(rows[2][:512], np.arange(512, dtype=np.int32))
            tensor.write(np.arange(512), rows[0][:512])
            block = tensor.block(7)
            self.assertIsNotNone(block.center)
            self.assertEqual(block.start is not None, turned)

    def test_codecs_of_what_was_learnt(self):
        """Codecs that are made from the learned transform store rows as the tensor does. Without
        its centre and matrix they do not.
        """
        rows, like = text(1), kvant.Codec("trellis-4", DIM)
        scheme = kvant.Scheme(k=SPEC, v="trellis-4", n_layers=1, n_kv_heads=KV_HEADS, head_dim=DIM)
        tensor = kvant.Tensor(scheme.codecs(0, "k"), n_blocks=8)
        tensor.note_queries(rows[2][:512])
        tensor.write(np.arange(512), rows[0][:512])
        stored = tensor.read(448, 64)
        for head in range(KV_HEADS):
            codec, x = tensor.make_codec(7, head, like), rows[0][448:512, head]
            center = tensor.block(7, head).center
            self.assertTrue(
                np.allclose(
                    codec.decode(codec.encode(x, center), 64, center),
                    stored[:, head],
                    rtol=0,
                    atol=1e-4,
                )
            )
            self.assertFalse(
                np.allclose(
                    like.decode(like.encode(x, center), 64, center),
                    stored[:, head],
                    rtol=0,
                    atol=1e-2,
                )
            )
        self.refused(ValueError, "kv_head: 2", tensor.make_codec, 7, 2, like)
        self.refused(TypeError, "like", tensor.make_codec, 7, 0, "trellis-4")


if __name__ == "__main__":
    unittest.main()
