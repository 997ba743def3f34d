"""kvant.Cache on the CPU: attention against NumPy, sequences, stores, refusals, threads."""

import threading
import unittest

from common import TestCase, normal, np
from reference import attention, growth, rounding

import kvant
from kvant import library

LAYERS, HEADS, KV_HEADS, DIM = 3, 9, 3, 64
SHAPE = dict(n_layers=LAYERS, n_heads=HEADS, n_kv_heads=KV_HEADS, head_dim=DIM)


def rows(seed, n, heads=KV_HEADS):
    return normal(seed, n, heads, DIM)


def fill(cache, sequence, seed, n):
    """Appends different rows to every layer. The rows of a call are a part of one stream for each
    seed.
    """
    for layer in range(LAYERS):
        cache.append(layer, sequence, rows(100 * seed + layer, n), rows(100 * seed + 50 + layer, n))


def outputs(cache, sequence, n=2):
    return [cache.attend(layer, sequence, rows(7 + layer, n, HEADS)) for layer in range(LAYERS)]


class Attends(TestCase):
    def same(self, got, wanted):
        for one, other in zip(got, wanted):
            self.assertTrue(np.array_equal(one, other))

    def test_the_first_program(self):
        """Tokens are appended layer by layer, one by one, with the default preset's codecs before
        these learn from queries, which tensors in Python do not see. Tensors with the same rows
        attend to the same bits. Without rounding to integers, both are within the rounding of
        binary32 of NumPy over the rows that they hold.
        """
        specs = {"k": "trellis-4:center=first,norm=first", "v": "trellis-4"}
        cache, n = kvant.Cache(**SHAPE, max_tokens=4096, **specs), 150
        scheme = kvant.Scheme(**specs, n_layers=LAYERS, n_kv_heads=KV_HEADS, head_dim=DIM)
        tensors = [kvant.Tensor(scheme.codecs(0, role), n_blocks=3) for role in "kv"]
        sequence = cache.new_sequence()
        k, v, q = rows(1, n), rows(2, n), rows(3, n, HEADS)
        for t in range(n):
            for layer in range(LAYERS):
                cache.append(layer, sequence, k[t : t + 1], v[t : t + 1])
                out = cache.attend(layer, sequence, q[t : t + 1])
            for tensor, x in zip(tensors, (k, v)):
                tensor.write(np.arange(t, t + 1), x[t : t + 1])
        self.assertEqual([cache.length(sequence, layer) for layer in range(LAYERS)], [n] * LAYERS)
        self.assertEqual((cache.bytes, cache.info.n_free_blocks), (cache.info.bytes, 64 - 3))
        self.same([out], [kvant.attention(*tensors, q[-1:], n)])
        held = [tensor.read(0, n) for tensor in tensors]
        wanted, _, size = attention(q[-1:], *held, DIM**-0.5)
        bound = rounding(q[-1:], *held, DIM**-0.5, size, *map(growth, tensors))
        exact = kvant.attention(*tensors, q[-1:], n, exact=True)
        self.assertTrue((np.abs(exact - wanted).max(2) <= bound).all())

    def test_raw_rows(self):
        """The formula of attention.h, within the rounding of binary32."""
        cache, n = kvant.Cache(**SHAPE, max_tokens=512, k="f32", n_threads=2), 200
        sequence = cache.new_sequence()
        k, v, q = rows(1, n), rows(2, n), rows(3, 5, HEADS)
        cache.append(1, sequence, k[:130], v[:130])
        cache.append(1, sequence, k[130:], v[130:])
        for options in (
            {},
            {"causal": False},
            {"window": 70},
            {"sinks": normal(4, HEADS)},
            {"scale": 0.3},
        ):
            wanted, _, size = attention(q, k, v, **{"scale": DIM**-0.5} | options)
            bound = rounding(q, k, v, options.get("scale", DIM**-0.5), size)
            got = cache.attend(1, sequence, q, **options)
            self.assertTrue((np.abs(got - wanted).max(2) <= bound).all(), options)

    def test_codes(self):
        """Without rounding of queries and weights to integers, attention on codes equals attention
        over the decoded rows.
        """
        cache, n = kvant.Cache(**SHAPE, max_tokens=512, k="turboquant-4", v="int-4"), 200
        sequence = cache.new_sequence()
        k, v, q = rows(1, n), rows(2, n), rows(3, 5, HEADS)
        cache.append(0, sequence, k, v)
        decoded = []
        for role, spec, x in (("k", "turboquant-4", k), ("v", "int-4", v)):
            codec = kvant.Codec(spec, DIM, role)
            decoded.append(
                np.stack([codec.decode(codec.encode(x[:, head]), n) for head in range(KV_HEADS)], 1)
            )
        wanted, _, size = attention(q, *decoded, DIM**-0.5)
        got = cache.attend(0, sequence, q, exact=True)
        self.assertTrue(
            (np.abs(got - wanted).max(2) <= rounding(q, *decoded, DIM**-0.5, size)).all()
        )

    def test_presets_attend_as_their_tensors_do(self):
        scheme = kvant.Scheme("balanced", n_layers=LAYERS, n_kv_heads=KV_HEADS, head_dim=DIM)
        cache, n = kvant.Cache(**SHAPE, max_tokens=512, scheme=scheme), 200
        sequence = cache.new_sequence()
        k, v, q = rows(1, n), rows(2, n), rows(3, 5, HEADS)
        cache.append(0, sequence, k, v)
        tensors = []
        for role, x in (("k", k), ("v", v)):
            tensors.append(
                kvant.Tensor(scheme.codecs(0, role), n_blocks=8, exact=scheme.exact(512))
            )
            tensors[-1].write(np.arange(n), x)
        self.same([cache.attend(0, sequence, q)], [kvant.attention(*tensors, q, n)])
        self.assertEqual(cache.info.true_bits, scheme.true_bits)

    def test_outputs_of_the_caller_and_views(self):
        cache = kvant.Cache(**SHAPE, max_tokens=128, k="int-8")
        sequence = cache.new_sequence()
        wide, q = normal(1, 70, 2, KV_HEADS, DIM), normal(2, 2, HEADS, 2, DIM)[:, :, 0]
        cache.append(0, sequence, wide[:, 0], wide[:, 1])
        out, lse = np.empty((2, HEADS, DIM), np.float32), np.empty((2, HEADS), np.float32)
        self.assertIs(cache.attend(0, sequence, q, out=out, lse=lse), out)
        other = kvant.Cache(**SHAPE, max_tokens=128, k="int-8")
        other.append(0, other.new_sequence(), wide[:, 0].copy(), wide[:, 1].copy())
        self.same([other.attend(0, 0, q.copy()), lse], [out, lse])
        self.assertTrue(np.isfinite(lse).all())

    def test_several_sequences_at_once(self):
        """A batch is stored and attended to like single tokens."""
        caches = [
            kvant.Cache(**SHAPE, max_tokens=512, max_sequences=2, k="turboquant-4")
            for _ in range(2)
        ]
        k = normal(1, 2, 70, KV_HEADS, DIM)
        v = normal(2, 2, 70, KV_HEADS, DIM)
        q = normal(3, 2, 5, HEADS, DIM)
        pairs = [[cache.new_sequence() for _ in range(2)] for cache in caches]
        for i in range(2):
            caches[0].append(1, pairs[0][i], k[i], v[i])
        caches[1].append_batch(1, pairs[1], k, v)
        out = np.empty((2, 5, HEADS, DIM), np.float32)
        self.assertIs(caches[1].attend_batch(1, pairs[1], q, out=out), out)
        self.same(out, [caches[0].attend(1, pairs[0][i], q[i]) for i in range(2)])
        self.same(
            caches[1].attend_batch(1, pairs[1], q[:, :1].copy()),
            [caches[0].attend(1, s, x[:1]) for s, x in zip(pairs[0], q)],
        )
        self.assertEqual(caches[1].attend_batch(1, [], q[:0]).shape, (0, 5, HEADS, DIM))
        self.refused(ValueError, "no sequence 2", caches[1].append_batch, 1, [0, 2], k, v)
        self.refused(ValueError, "k: ", caches[1].append_batch, 1, [0], k, v)

    def test_rows_are_read_back(self):
        cache, sequence = kvant.Cache(**SHAPE, max_tokens=512, k="f32", v="int-4"), 0
        k, v = rows(1, 200), rows(2, 200)
        cache.new_sequence()
        cache.append(2, sequence, k, v)
        codec = kvant.Codec("int-4", DIM, "v")
        decoded = np.stack(
            [codec.decode(codec.encode(v[:, head]), 200) for head in range(KV_HEADS)], 1
        )
        self.same(cache.read(2, sequence), (k, decoded))
        self.same(cache.read(2, sequence, 60, 70), (k[60:130], decoded[60:130]))
        self.assertEqual(cache.read(0, sequence)[0].shape, (0, KV_HEADS, DIM))
        cache.drop(sequence, 64)
        self.same(cache.read(2, sequence, 60, 10)[0], np.concatenate([0 * k[60:64], k[64:70]]))
        self.refused(ValueError, "n: ", cache.read, 2, sequence, 150, 51)

    def test_arrays_with_dlpack(self):
        class Other:
            def __init__(self, array):
                self.array = array

            def __dlpack__(self, **named):
                return self.array.__dlpack__(**named)

            def __dlpack_device__(self):
                return self.array.__dlpack_device__()

        caches = [kvant.Cache(**SHAPE, max_tokens=128, k="int-8") for _ in range(2)]
        k, v, q = rows(1, 70), rows(2, 70), rows(3, 2, HEADS)
        for cache, wrap in zip(caches, (np.asarray, Other)):
            cache.append(0, cache.new_sequence(), wrap(k), wrap(v))
        out = np.empty((2, HEADS, DIM), np.float32)
        caches[1].attend(0, 0, Other(q), out=Other(out))
        self.same([out], [caches[0].attend(0, 0, q)])
        self.refused(TypeError, "q: |list", caches[0].attend, 0, 0, q.tolist())

    def test_values_of_another_width(self):
        cache = kvant.Cache(**SHAPE | {"head_dim": 96}, v_head_dim=64, max_tokens=64, k="f16")
        sequence = cache.new_sequence()
        cache.append(0, sequence, normal(1, 9, KV_HEADS, 96), normal(2, 9, KV_HEADS, 64))
        self.assertEqual(cache.attend(0, sequence, normal(3, 1, HEADS, 96)).shape, (1, HEADS, 64))


class Sequences(Attends):
    def setUp(self):
        self.cache = kvant.Cache(**SHAPE, max_tokens=640, max_sequences=3, k="turboquant-4")
        self.sequence = self.cache.new_sequence()
        fill(self.cache, self.sequence, 1, 100)

    def test_forks_share_until_one_writes(self):
        before, blocks = outputs(self.cache, self.sequence), self.cache.info.n_free_blocks
        fork = self.cache.fork(self.sequence)
        self.assertEqual(self.cache.info.n_free_blocks, blocks)
        fill(self.cache, fork, 2, 10)
        self.assertEqual(self.cache.info.n_free_blocks, blocks - 1)
        self.assertEqual((self.cache.length(fork), self.cache.length(self.sequence)), (110, 100))
        self.same(outputs(self.cache, self.sequence), before)
        fill(self.cache, self.sequence, 2, 10)
        self.same(outputs(self.cache, self.sequence), outputs(self.cache, fork))
        self.cache.free(self.sequence)
        fill(self.cache, fork, 3, 1)
        self.assertEqual(self.cache.length(fork), 111)
        self.refused(ValueError, "no sequence 0", self.cache.length, self.sequence)

    def test_truncation(self):
        before = outputs(self.cache, self.sequence)
        fill(self.cache, self.sequence, 2, 90)
        self.cache.truncate(self.sequence, 100)
        self.assertEqual(self.cache.length(self.sequence), 100)
        self.same(outputs(self.cache, self.sequence), before)

    def test_dropped_blocks_are_masked(self):
        hidden = np.zeros((1, 100), np.float16)
        hidden[:, :64] = -np.inf
        q = rows(5, 1, HEADS)
        wanted = self.cache.attend(0, self.sequence, q, mask=hidden)
        blocks = self.cache.info.n_free_blocks
        self.cache.drop(self.sequence, 70)
        self.assertEqual(self.cache.info.n_free_blocks, blocks + 1)
        got = self.cache.attend(0, self.sequence, q)
        self.assertTrue(np.allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max()))
        self.assertEqual(self.cache.length(self.sequence), 100)

    def test_blocks_travel(self):
        other = kvant.Cache(**SHAPE, max_tokens=640, max_sequences=2, k="turboquant-4")
        other.new_sequence()
        there = other.new_sequence()
        for index in range(2):
            other.import_blocks(there, bytearray(self.cache.export_blocks(self.sequence, index)))
        self.assertEqual(other.length(there), 100)
        self.same(outputs(other, there), outputs(self.cache, self.sequence))

    def test_exports_hold_the_tokens_alone(self):
        """A sequence that was cut, and a fork that shares its block, export the same bytes as a
        cache that never had more tokens.
        """
        names = ("f16", "int-4", "turboquant-4", "int-4:axis=channel", "trellis-3")
        presets = ("quality", "balanced", "small", "tiny")
        specs = [dict(k=name, v=name) for name in names] + [dict(preset=name) for name in presets]
        for spec in specs:
            shape = dict(**SHAPE, max_tokens=640, max_sequences=2)
            cache, clean = kvant.Cache(**shape, **spec), kvant.Cache(**shape, **spec)
            for one in (cache, clean):
                sequence = one.new_sequence()
                fill(one, sequence, 1, 64)
                fill(one, sequence, 2, 6)
            fill(cache, sequence, 3, 30)
            fork = cache.fork(sequence)
            cache.truncate(fork, 70)
            wanted = clean.export_blocks(sequence, 1)
            self.assertEqual(cache.export_blocks(fork, 1), wanted, spec)
            cache.truncate(sequence, 70)
            self.assertEqual(cache.export_blocks(sequence, 1), wanted, spec)
            self.assertEqual(int.from_bytes(wanted[:8], "little"), 6)

    def test_damaged_and_foreign_blocks(self):
        data = self.cache.export_blocks(self.sequence, 0)
        foreign = kvant.Cache(**SHAPE, max_tokens=64, k="turboquant-3")
        self.assertEqual(
            self.refused(
                kvant.Error, "import", foreign.import_blocks, foreign.new_sequence(), data
            ).status,
            70,
        )
        into = self.cache.new_sequence()
        for bad in (b"", data[:-1], data[:1000] + bytes([data[1000] ^ 1]) + data[1001:]):
            self.assertEqual(
                self.refused(kvant.Error, "import", self.cache.import_blocks, into, bad).status, 70
            )
            self.assertEqual(self.cache.length(into), 0)
        self.refused(kvant.Error, "export|block 2", self.cache.export_blocks, self.sequence, 2)
        self.refused(TypeError, "", self.cache.import_blocks, into, "text")
        self.refused(
            kvant.Error, "import|whole block", self.cache.import_blocks, self.sequence, data
        )

    def test_threads_take_turns(self):
        """Each thread has a sequence of one cache. The sequences hold the same rows as if one
        thread had written them.
        """
        wanted = outputs(self.cache, self.sequence)
        other = kvant.Cache(**SHAPE, max_tokens=640, max_sequences=4, k="turboquant-4")
        failures = []

        def work():
            sequence = other.new_sequence()
            for layer in range(LAYERS):
                k, v = rows(100 + layer, 100), rows(150 + layer, 100)
                for t in range(0, 100, 5):
                    other.append(layer, sequence, k[t : t + 5], v[t : t + 5])
            if not all(np.array_equal(*pair) for pair in zip(outputs(other, sequence), wanted)):
                failures.append(sequence)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual((failures, other.info.n_free_blocks), ([], 13 - 8))


class SlowLibrary:
    """A libkvant whose append waits until the test releases it."""

    def __init__(self, real):
        self.real = real
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.calls = []

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self.real, name)

    def kvant_cache_append(self, *arguments):
        self.begun.set()
        self.go_on.wait()
        return self.real.kvant_cache_append(*arguments)


class Turns(TestCase):
    def test_a_call_waits_for_the_one_before(self):
        cache, real = kvant.Cache(**SHAPE, max_tokens=64, k="int-4"), library.library()
        sequence, slow, lengths = cache.new_sequence(), SlowLibrary(real), []
        self.addCleanup(setattr, library, "_library", real)
        library._library = slow
        first = threading.Thread(target=lambda: cache.append(0, sequence, rows(1, 4), rows(2, 4)))
        second = threading.Thread(target=lambda: lengths.append(cache.length(sequence)))
        first.start()
        slow.begun.wait()
        second.start()
        second.join(0.05)
        self.assertEqual((slow.calls, lengths), ([], []))
        slow.go_on.set()
        first.join()
        second.join()
        self.assertEqual(lengths, [4])


class Refusals(TestCase):
    def setUp(self):
        self.cache = kvant.Cache(**SHAPE, max_tokens=64, k="int-4")
        self.sequence = self.cache.new_sequence()

    def test_creation(self):
        for words, named in (
            ("n_layers: 0", {"n_layers": 0}),
            ("head_dim: 513", {"head_dim": 513}),
            ("max_tokens: -1", {"max_tokens": -1}),
            ("scale: nan", {"scale": float("nan")}),
        ):
            self.refused(ValueError, words, kvant.Cache, **SHAPE | {"max_tokens": 64} | named)
        for words, named in (
            ("no preset 'large'", {"preset": "large"}),
            ("int-99", {"k": "int-99"}),
            ("n_heads", {"n_heads": 10}),
            ("no device 'tpu'", {"device": "tpu"}),
            ("/nowhere.kvcal", {"calibration": "/nowhere.kvcal"}),
        ):
            self.refused(kvant.Error, words, kvant.Cache, **SHAPE | {"max_tokens": 64} | named)
        self.refused(
            TypeError, "scheme: |str", kvant.Cache, **SHAPE, max_tokens=64, scheme="balanced"
        )

    def test_a_gpu_that_is_not_there(self):
        """Whichever function is missing, the error names it and no call follows."""
        try:
            kvant.Cache(**SHAPE, max_tokens=64, device="cuda", k="int-4")
        except kvant.Error as error:
            self.assertIn(error.status, (30, 80))

    def test_rows(self):
        good = rows(1, 4)
        for error, words, bad in (
            (ValueError, "shape", rows(1, 4, 2)),
            (ValueError, "shape", normal(1, KV_HEADS, DIM)),
            (TypeError, "float16", good.astype(np.float16)),
            (TypeError, "list", [1.0]),
        ):
            for call in ((bad, good), (good, bad)):
                self.refused(error, words, self.cache.append, 0, self.sequence, *call)
        self.refused(
            ValueError, "v: |[4, 3, 64]", self.cache.append, 0, self.sequence, good, rows(1, 5)
        )
        bad = good.copy()
        bad[3, 1, 2] = np.nan
        self.assertEqual(
            self.refused(
                kvant.Error, "layer 0|NaN", self.cache.append, 0, self.sequence, good, bad
            ).status,
            50,
        )
        self.assertEqual(self.cache.length(self.sequence), 0)
        self.cache.append(0, self.sequence, good[:0], good[:0])
        self.assertEqual(self.cache.length(self.sequence), 0)

    def test_places(self):
        self.refused(
            ValueError, "layer: 3", self.cache.append, 3, self.sequence, rows(1, 1), rows(2, 1)
        )
        self.refused(ValueError, "no sequence 1", self.cache.append, 0, 1, rows(1, 1), rows(2, 1))
        self.refused(ValueError, "no sequence 'a'", self.cache.fork, "a")
        self.refused(
            ValueError, "no sequence None", self.cache.append, 0, None, rows(1, 1), rows(2, 1)
        )
        self.assertEqual(
            self.refused(kvant.Error, "max_sequences", self.cache.new_sequence).status, 60
        )
        self.assertEqual(
            self.refused(kvant.Error, "max_sequences", self.cache.fork, self.sequence).status, 60
        )
        error = self.refused(
            kvant.Error,
            "max_tokens, 64",
            self.cache.append,
            0,
            self.sequence,
            rows(1, 65),
            rows(2, 65),
        )
        self.assertEqual((error.status, self.cache.length(self.sequence)), (60, 0))

    def test_attention(self):
        self.cache.append(0, self.sequence, rows(1, 4), rows(2, 4))
        call, good = self.cache.attend, rows(3, 2, HEADS)
        for error, words, named in (
            (ValueError, "q: |[n, 9, 64]", {"q": rows(3, 2, KV_HEADS)}),
            (TypeError, "q: |float64", {"q": good.astype(np.float64)}),
            (kvant.Error, "causal", {"q": rows(3, 5, HEADS)}),
            (ValueError, "out: |[2, 9, 64]", {"out": good[:1].copy()}),
            (ValueError, "out: |written", {"out": np.broadcast_to(np.float32(0), good.shape)}),
            (ValueError, "lse: |[2, 9]", {"lse": np.empty((2, 8), np.float32)}),
            (ValueError, "mask: |[2, 4]", {"mask": np.zeros((2, 5), np.float16)}),
            (TypeError, "sinks: |float64", {"sinks": np.zeros(HEADS)}),
            (ValueError, "window: -1", {"window": -1}),
            (ValueError, "logit_softcap: inf", {"logit_softcap": float("inf")}),
        ):
            self.refused(error, words, call, 0, self.sequence, **{"q": good} | named)

    def test_a_closed_cache(self):
        with self.cache as cache:
            cache.append(0, self.sequence, rows(1, 4), rows(2, 4))
            self.assertNotIn("closed", repr(cache))
        self.refused(ValueError, "closed", self.cache.attend, 0, self.sequence, rows(3, 1, HEADS))
        self.refused(ValueError, "closed", self.cache.new_sequence)
        self.refused(ValueError, "closed", getattr, self.cache, "info")
        self.assertIn("closed", repr(self.cache))
        self.cache.close()


if __name__ == "__main__":
    unittest.main()
