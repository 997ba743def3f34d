"""kvant.Codec: the bytes and numbers of the library, partly written pages, refusals, threads."""

import copy
import pickle
import threading
import unittest

from common import MASK, ROOT, TestCase, fnv1a, normal, np

import kvant

VECTORS = ROOT / "tests" / "vectors"
TOKENS = 64


def split_mix(seed):
    state = seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        yield z ^ z >> 31


def xorshift():
    state = 88172645463325252
    while True:
        state ^= state << 13 & MASK
        state ^= state >> 7
        state ^= state << 17 & MASK
        yield state


def heavy_tail(words, n, dim):
    """Rows that are exact in binary32: integers over powers of two (tests/unit/same_bytes.c,
    tests/vectors/make.py).
    """
    numbers = [
        ((word >> 40 & 0xFFFF) - 32768) / 2 ** (8 + (word >> 60))
        for _, word in zip(range(n * dim), words)
    ]
    return np.array(numbers, np.float32).reshape(n, dim)


def left_out(spec):
    """Whether this build of libkvant lacks the spec's family: a build may leave out the papers'
    families.
    """
    try:
        kvant.needs_calibration(spec, "k")
        return False
    except kvant.Error:
        if "octopus" in {family.name for family in kvant.codecs()}:
            raise
        return True


class SameBytes(TestCase):
    def test_hashes_of_every_spec(self):
        """tests/unit/same_bytes.txt at head_dim 64, as same_bytes.c makes it. Specs that need its
        calibration, and learned matrices, are left to same_bytes.c.
        """
        rows, n = heavy_tail(xorshift(), 4 * TOKENS, 64), 0
        for line in (ROOT / "tests" / "unit" / "same_bytes.txt").read_text().splitlines():
            spec, dim, wanted = line.split()
            if (
                dim != "64"
                or spec == "learnt"
                or left_out(spec)
                or kvant.needs_calibration(spec, "k")
            ):
                continue
            hash_of_all = 0xCBF29CE484222325
            for role in "kv":
                hash_of_all = fnv1a(kvant.Codec(spec, 64, role, seed=42).encode(rows), hash_of_all)
            self.assertEqual(f"{hash_of_all:016x}", wanted, spec)
            n += 1
        self.assertGreater(n, 20)

    def test_golden_vectors(self):
        """tests/vectors/vectors.txt, which an independent implementation made. Decoded numbers err
        by at most the rounding of a sum of head_dim products, head_dim 2^-24 times the length of
        the row (tests/unit/test_vectors.c).
        """
        calibration, n, made = kvant.Calibration(VECTORS / "vectors.kvcal"), 0, {}
        for line in (VECTORS / "vectors.txt").read_text().splitlines():
            if line.startswith("#") or left_out(line.split()[0]):
                continue
            spec, dim, role, seed, setting, _, _, wanted, page_bytes = line.split()[:9]
            dim = int(dim)
            if dim not in made:
                rows = heavy_tail(split_mix(dim), TOKENS, dim)
                rows[5], rows[6], rows[7] = 0, rows[6] * np.float32(2.0**-100), 1.5
                made[dim] = rows
            place = {"calibration": calibration, "kv_head": 1} if setting == "2" else {}
            codec = kvant.Codec(spec, dim, role.lower(), seed=int(seed), **place)
            channels = np.arange(dim)
            affine = {}
            if setting == "1":
                affine["center"] = (channels % 7 - 3).astype(np.float32) / np.float32(4)
                affine["scale"] = np.float32(2) ** (channels % 5 - 2).astype(np.float32)
            page = codec.encode(made[dim], **affine)
            self.assertEqual(page.shape, (1, int(page_bytes)), line)
            self.assertEqual(f"{fnv1a(page):016x}", wanted, line)
            decoded = codec.decode(page, **affine).astype(np.float64)
            for sample in line.split()[9:]:
                place, value = sample.split("=")
                token, channel = map(int, place.split(":"))
                bound = dim * 2.0**-24 * np.linalg.norm(decoded[token])
                self.assertLessEqual(
                    abs(decoded[token, channel] - float(value)), bound, (line, sample)
                )
            n += 1
        self.assertGreater(n, 60)


class RoundTrips(TestCase):
    def test_what_a_codec_says_of_itself(self):
        codec = kvant.Codec("int-4", 128, "v")
        self.assertEqual(
            (codec.head_dim, codec.role, codec.bits, codec.page_bytes), (128, "v", 4, 4352)
        )
        self.assertEqual(codec.true_bits, 8 * 4352 / (64 * 128))
        self.assertEqual((codec.center, codec.norm, codec.block_tokens), ("none", "none", 1))
        same = kvant.Codec(codec.spec, 128, "v")
        self.assertEqual((same.spec, same.fingerprint), (codec.spec, codec.fingerprint))
        first = kvant.Codec("turboquant-4:center=first,norm=first,sink=4,recent=32", 128)
        self.assertEqual(
            (first.center, first.norm, first.sink_tokens, first.recent_tokens),
            ("first", "first", 4, 32),
        )

    def test_raw_rows_come_back(self):
        rows = normal(1, 130, 48)
        self.assertEqual(
            kvant.Codec("f32", 48).decode(kvant.Codec("f32", 48).encode(rows), 130).tobytes(),
            rows.tobytes(),
        )
        codec = kvant.Codec("f16", 48)
        self.assertTrue(
            np.array_equal(codec.decode(codec.encode(rows), 130), rows.astype(np.float16))
        )

    def test_uniform_codes_are_off_by_half_a_step(self):
        """int-8 of a token: half a step of span / 255. Zero point and scale are fp16, which moves
        the last level by 2^-11 of the zero point and of the span. The step's own rounding is of
        second order.
        """
        rows = normal(2, 64, 128)
        codec = kvant.Codec("int-8", 128)
        span = rows.max(1) - rows.min(1)
        bound = (span / 255 / 2 + 2.0**-11 * (np.abs(rows.min(1)) + span)) * (1 + 2.0**-10)
        self.assertTrue((np.abs(codec.decode(codec.encode(rows)) - rows).max(1) <= bound).all())

    def test_pages_that_are_partly_written(self):
        rows, codec = normal(3, 100, 64), kvant.Codec("turboquant-4", 64)
        pages = codec.encode(rows)
        self.assertEqual(pages.shape, (2, codec.page_bytes))
        whole = codec.encode(np.concatenate([rows, normal(4, 28, 64)]))
        self.assertEqual(pages[0].tobytes(), whole[0].tobytes())
        self.assertTrue(np.array_equal(codec.decode(pages, 100), codec.decode(whole, 100)))
        self.assertEqual(codec.decode(pages).shape, (128, 64))
        self.assertEqual(codec.decode(codec.encode(rows[:0])).shape, (0, 64))

    def test_rows_with_a_stride_and_unaligned_pages(self):
        wide, codec = normal(5, 130, 3, 64), kvant.Codec("int-4", 64)
        once = np.broadcast_to(wide[0, 0], (130, 64))
        for view in (wide[:, 1], wide[::2, 2], wide[::-1, 1], wide.reshape(130, 192)[:, ::3], once):
            self.assertEqual(codec.encode(view).tobytes(), codec.encode(view.copy()).tobytes())
        pages = codec.encode(wide[:, 0])
        shifted = np.zeros(pages.size + 1, np.uint8)[1:].reshape(pages.shape)
        shifted[:] = pages
        self.assertTrue(np.array_equal(codec.decode(shifted), codec.decode(pages)))

    def test_scores_are_products_with_decoded_rows(self):
        """Scores and products are sums of head_dim products in binary32, with rows rotated back or
        with rotated queries. Each rotation adds log2 steps, far below 20 roundings.
        """
        codec, queries = kvant.Codec("turboquant-4", 128), normal(6, 3, 128)
        pages = codec.encode(normal(7, 100, 128))
        scores, rows = codec.scores(queries, pages), codec.decode(pages).astype(np.float64)
        self.assertEqual(scores.shape, (3, 128))
        lengths = np.outer(np.linalg.norm(queries, axis=1), np.linalg.norm(rows, axis=1))
        self.assertTrue(
            (np.abs(scores - queries @ rows.T) <= 2 * (128 + 20) * 2.0**-24 * lengths).all()
        )
        self.assertEqual(codec.scores(queries[:0], pages).shape, (0, 128))

    def test_another_process_can_have_it(self):
        """Pickled and copied codecs give the same bytes, because a codec follows from its
        arguments. A codec from a calibration or a scheme does not.
        """
        codec = kvant.Codec("trellis-4", 64, "v", seed=3)
        found = normal(1, 70, 64)
        for other in (pickle.loads(pickle.dumps(codec)), copy.deepcopy(codec)):
            self.assertEqual(other.fingerprint, codec.fingerprint)
            self.assertTrue(np.array_equal(other.encode(found), codec.encode(found)))
        (borrowed,) = kvant.Scheme("balanced", n_layers=1, n_kv_heads=1, head_dim=64).codecs(0, "k")
        self.refused(TypeError, "codec|scheme|pickled", pickle.dumps, borrowed)

    def test_threads_share_a_codec(self):
        codec, rows = kvant.Codec("trellis-3", 64), normal(8, 256, 64)
        wanted, got = codec.encode(rows).tobytes(), [None] * 4

        def work(i):
            got[i] = codec.encode(rows).tobytes()

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(got, [wanted] * 4)


class Refusals(TestCase):
    def test_specs(self):
        self.assertEqual(
            self.refused(
                kvant.Error, "codec 'int-99'|2 to 8 bits", kvant.Codec, "int-99", 64
            ).status,
            20,
        )
        error = self.refused(
            kvant.Error, "needs a calibration", kvant.Codec, "int-4:center=file", 64
        )
        self.assertEqual(error.status, 30)
        self.assertIsNone(kvant.check_spec("int-4"))
        self.refused(kvant.Error, "int-99", kvant.check_spec, "int-99")
        self.assertTrue(kvant.needs_calibration("int-4:center=file", "k"))
        self.assertFalse(kvant.needs_calibration("int-4"))
        self.refused(kvant.Error, "int-99", kvant.needs_calibration, "int-99")

    def test_arguments(self):
        self.refused(TypeError, "spec: |None", kvant.Codec, None, 64)
        self.refused(TypeError, "spec: |b'int-4'", kvant.Codec, b"int-4", 64)
        self.refused(ValueError, "spec: |zero byte", kvant.Codec, "int\0-4", 64)
        self.refused(ValueError, "head_dim: 0", kvant.Codec, "int-4", 0)
        self.refused(ValueError, "head_dim: 513", kvant.Codec, "int-4", 513)
        self.refused(TypeError, "head_dim: |64.0", kvant.Codec, "int-4", 64.0)
        self.refused(ValueError, "role: |'q'", kvant.Codec, "int-4", 64, "q")
        self.refused(ValueError, "seed: -1", kvant.Codec, "int-4", 64, seed=-1)
        self.refused(
            TypeError, "calibration: |str", kvant.Codec, "int-4", 64, calibration="model.kvcal"
        )
        scheme = kvant.Scheme("balanced", n_layers=1, n_kv_heads=1, head_dim=64)
        self.refused(TypeError, "copied", copy.copy, scheme)

    def test_rows(self):
        codec = kvant.Codec("int-4", 64)
        self.refused(TypeError, "rows: |float64", codec.encode, normal(1, 4, 64).astype(np.float64))
        self.refused(TypeError, "rows: |list", codec.encode, [[0.0] * 64])
        self.refused(ValueError, "rows: |[n, 64]|[4, 63]", codec.encode, normal(1, 4, 63))
        self.refused(ValueError, "rows: |[n, 64]", codec.encode, normal(1, 64))
        for bad in (np.nan, np.inf):
            rows = normal(1, 70, 64)
            rows[65, 3] = bad
            self.assertEqual(
                self.refused(kvant.Error, "rows 64 to 69|NaN", codec.encode, rows).status, 50
            )
        rows = normal(1, 2, 64)
        rows[0, 0] = 1e30
        self.assertEqual(self.refused(kvant.Error, "rows 0 to 1", codec.encode, rows).status, 51)
        rows = normal(1, 40, 64)
        self.refused(
            ValueError,
            "rows: |whole blocks of 32|40",
            kvant.Codec("int-2:axis=channel", 64).encode,
            rows,
        )
        self.refused(
            ValueError, "center: |[64]", codec.encode, normal(1, 4, 64), center=normal(1, 63)
        )
        self.refused(TypeError, "scale: ", codec.encode, normal(1, 4, 64), scale=1.0)

    def test_pages(self):
        codec = kvant.Codec("int-4", 64)
        pages = codec.encode(normal(1, 64, 64))
        self.refused(ValueError, f"pages: |[n, {codec.page_bytes}]", codec.decode, pages[:, :-1])
        self.refused(TypeError, "pages: |int8", codec.decode, pages.astype(np.int8))
        self.refused(ValueError, "n: 65", codec.decode, pages, 65)
        self.refused(ValueError, "queries: |[n, 64]", codec.scores, normal(1, 3, 32), pages)


class Families(TestCase):
    def test_every_spec_of_the_list_is_one(self):
        families = {family.name: family for family in kvant.codecs()}
        self.assertLessEqual({"f16", "int", "turboquant", "trellis"}, set(families))
        for family in families.values():
            for spec in family.specs:
                self.assertIsInstance(kvant.needs_calibration(spec, "k"), bool)
        self.assertEqual(families["f16"].specs, ("f16",))
        self.assertIn("turboquant-3", families["turboquant"].specs)


if __name__ == "__main__":
    unittest.main()
