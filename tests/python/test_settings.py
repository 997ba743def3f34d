"""Presets, settings files, schemes and calibrations from Python."""

import pathlib
import tempfile
import unittest

from common import ROOT, TestCase, normal, np

import kvant

SHAPE = dict(n_layers=3, n_kv_heads=2, head_dim=64)
VECTORS = ROOT / "tests" / "vectors" / "vectors.kvcal"


class WithFolder(TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)


class Settings(WithFolder):
    LAYERS = [
        (("int-4", 2, 64), (("int-2", "trellis-3"), 2, 64)),
        (("f16", 2, 64), ("turboquant-4", 2, 64)),
    ]

    def test_files_come_back(self):
        made = kvant.Settings(self.LAYERS, model="a model", model_fingerprint=2**63 + 1)
        path = self.folder / "m.kvant"
        made.save(path)
        for settings in (made, kvant.Settings.load(path)):
            self.assertEqual(settings.info, ("a model", 2**63 + 1, 2, None, 0))
            for layer, pair in enumerate(self.LAYERS):
                self.assertEqual((settings.layer(layer, "k"), settings.layer(layer, "v")), pair)
            settings.check()
            self.assertIsNone(settings.load_calibration())
        scheme = kvant.Scheme(settings=path, n_layers=2, n_kv_heads=2, head_dim=64)
        self.assertEqual(
            scheme.specs(0, "v"),
            tuple(kvant.Codec(spec, 64, "v").spec for spec in self.LAYERS[0][1][0]),
        )

    def test_a_calibration_goes_with_them(self):
        calibration = kvant.Calibration(VECTORS)
        (self.folder / "model.kvcal").write_bytes(VECTORS.read_bytes())
        info, path = calibration.info, self.folder / "m.kvant"
        place = (info.n_kv_heads, info.head_dim)
        layers = [(("turboquant-4:transform=file", *place), ("int-4", *place))] * info.n_layers
        kvant.Settings(layers, calibration="model.kvcal", calibration_checksum=info.checksum).save(
            path
        )
        settings = kvant.Settings.load(path)
        self.assertEqual(settings.load_calibration().info, info)
        settings.check(calibration)
        self.refused(kvant.Error, "calibration", settings.check)
        (self.folder / "model.kvcal").unlink()
        self.refused(kvant.Error, "model.kvcal", settings.load_calibration)

    def test_refusals(self):
        for error, words, layers in (
            (ValueError, "pair", [(("int-4", 2, 64),)]),
            (ValueError, "n_kv_heads: 0", [(("int-4", 0, 64), ("int-4", 2, 64))]),
            (
                ValueError,
                "1 specs are given for 2 kv heads",
                [((("int-4",), 2, 64), ("int-4", 2, 64))],
            ),
            (TypeError, "spec: |5", [(((5, "int-4"), 2, 64), ("int-4", 2, 64))]),
            (kvant.Error, "settings", [(("int 4!", 2, 64), ("int-4", 2, 64))]),
            (kvant.Error, "layers", []),
        ):
            self.refused(error, words, kvant.Settings, layers)
        wrong = kvant.Settings([(("int-99", 2, 64), ("int-4", 2, 64))])
        self.refused(kvant.Error, "layer 0, keys, int-99", wrong.check)
        self.refused(IndexError, "layer: 2", kvant.Settings(self.LAYERS).layer, 2, "k")
        self.refused(kvant.Error, "/nowhere", kvant.Settings.load, "/nowhere/m.kvant")
        path = self.folder / "m.kvant"
        kvant.Settings(self.LAYERS).save(path)
        path.write_text(path.read_text().replace("int-4", "int-3", 1))
        self.assertEqual(self.refused(kvant.Error, "m.kvant", kvant.Settings.load, path).status, 70)

    def test_presets(self):
        for name in ("quality", "balanced", "small", "tiny"):
            plain, calibrated = kvant.preset(name), kvant.preset(name, calibrated=True)
            self.assertEqual((plain.name, calibrated.name), (name, name))
            self.assertFalse(kvant.needs_calibration(plain.k, "k"))
            self.assertEqual(plain.more_k is not None, name == "tiny")
        self.refused(ValueError, "'large'", kvant.preset, "large")
        self.refused(TypeError, "None", kvant.preset, None)


class Scheme(WithFolder):
    def test_defaults_and_protection(self):
        scheme, plain = kvant.Scheme(**SHAPE), kvant.preset("balanced")
        self.assertEqual((scheme.preset, scheme.k, scheme.v), ("balanced", plain.k, plain.v))
        self.assertEqual((scheme.calibrated, scheme.needs_calibration), (False, False))
        mixed = kvant.Scheme(k="int-4", v="int-2", protect=1, protect_codec="int-8", **SHAPE)
        found = [
            [codec.spec.split(":")[0] for codec in mixed.codecs(layer, "v")] for layer in range(3)
        ]
        self.assertEqual(found, [["int-8"] * 2, ["int-2"] * 2, ["int-8"] * 2])
        bits = [
            kvant.Codec(spec, 64, role).true_bits
            for spec in ("int-8", "int-4", "int-2")
            for role in "kv"
        ]
        self.assertAlmostEqual(mixed.true_bits, (2 * (bits[0] + bits[1]) + bits[2] + bits[5]) / 6)

    def test_tiny_has_keys_of_more_bits_in_some_layers(self):
        scheme = kvant.Scheme(preset="tiny", n_layers=8, n_kv_heads=1, head_dim=256)
        self.assertEqual(
            [layer for layer in range(8) if scheme.specs(layer, "k")[0].startswith("trellis-3")],
            [2, 5, 7],
        )
        self.assertEqual({scheme.specs(layer, "v") for layer in range(8)}, {scheme.specs(0, "v")})
        self.assertEqual(scheme.true_bits, 2.25)

    @staticmethod
    def pages(scheme):
        """Bytes of a block's codes in all three layers."""
        layers = [scheme.codecs(layer, role) for layer in range(3) for role in "kv"]
        return sum(codec.page_bytes for codecs in layers for codec in codecs)

    def test_memory_of_a_context(self):
        """A cache takes as much memory as tensors of the same codecs, except for a step. A tensor
        that shares nothing has room for 64 rows of a step. All keys of a cache share room for 512
        rows, and so do all values.
        """
        scheme = kvant.Scheme("small", v_head_dim=32, **SHAPE)
        exact = scheme.exact(1000)
        self.assertEqual(exact, kvant.ExactPart(first=64, newest=64, total=128, step=64))
        self.assertEqual(scheme.exact(1 << 20, 4).total, 4 * (64 + 128))
        self.assertEqual(kvant.Scheme(k="int-4", **SHAPE).exact(4096), kvant.ExactPart(0, 0, 0, 0))
        tensors = [
            kvant.Tensor(scheme.codecs(layer, role), n_blocks=16, exact=exact)
            for layer in range(3)
            for role in "kv"
        ]
        alone = sum(tensor.info.bytes for tensor in tensors)
        row = 2 * (64 + 32) * 2  # keys and values of two kv heads, as fp16
        self.assertEqual(scheme.context_bytes(1000), alone - 3 * 64 * row + 512 * row)
        self.assertEqual(tensors[1].info.head_dim, 32)
        # 256 tokens are in 4 blocks, and the room is for no more. Three sequences may end in two
        # blocks more. The exact part of 128 rows begins within a block, so each tensor has 3 fp16
        # pages. With several sequences it has one page more.
        pages = self.pages(scheme)
        self.assertEqual(scheme.context_bytes(256), 4 * pages + (3 * 3 * 64 + 256) * row)
        self.assertEqual(scheme.context_bytes(256, 3), 6 * pages + (3 * 4 * 64 + 384) * row)
        three = dict(max_tokens=256, max_sequences=3, n_heads=2, v_head_dim=32)
        self.assertEqual(kvant.Cache(scheme=scheme, **three, **SHAPE).info.n_blocks, 6)
        plain = kvant.Scheme(k="int-4", v="int-4", **SHAPE)
        # Sizes without an exact part.
        self.assertEqual(plain.context_bytes(1000), 16 * self.pages(plain))

    def test_a_cache_uses_all_memory_of_its_context(self):
        """Each of three layers has pages for the codes of 32 blocks. It has 3 fp16 pages, for the
        first block and for the newest 64 rows, which begin within a block. The layer that is
        written last also has the 8 shared pages. The number cache.bytes counts a block once, as
        fp16 or as codes, but memory for codes is reserved for all blocks.
        """
        path, shape = self.folder / "m.kvant", dict(SHAPE, v_head_dim=32)
        layer = ("turboquant-4", 2, 64), ("turboquant-4", 2, 32)
        kvant.Settings([layer] * 3, model="m").save(path)
        scheme = kvant.Scheme(settings=path, **shape)
        cache = kvant.Cache(n_heads=2, max_tokens=2048, scheme=scheme, **shape)
        sequence = cache.new_sequence()
        for part in range(2):  # 2040 tokens, so that the last block is not full
            for layer in range(3):
                cache.append(layer, sequence, normal(part, 1020, 2, 64), normal(part, 1020, 2, 32))
        n_open = 3 * 3 + 8
        codes = self.pages(scheme) // 3
        self.assertEqual(scheme.context_bytes(2048), cache.bytes + n_open * codes)
        self.assertEqual(cache.bytes, (3 * 32 - n_open) * codes + n_open * 64 * 2 * (64 + 32) * 2)

    def test_a_calibration_beside_the_model(self):
        """The calibration is used if it was made with this very model file."""
        model, other = self.folder / "model.gguf", self.folder / "other.gguf"
        for seed, path in enumerate((model, other)):
            path.write_bytes(normal(seed, 5000).tobytes())
            calibrator = kvant.Calibrator(model_fingerprint=kvant.model_fingerprint(model))
            for layer, role in ((layer, role) for layer in range(3) for role in "kv"):
                calibrator.add_rows(layer, role, normal(layer, 64, 2, 64))
            calibrator.add_queries(0, 0, normal(9, 64, 64))
            calibrator.finish().save(path.with_suffix(".kvcal"))
        scheme = kvant.Scheme(k="int-4:center=file", model=model, **SHAPE)
        self.assertEqual(
            (scheme.calibrated, scheme.calibration_path), (True, str(model.with_suffix(".kvcal")))
        )
        self.assertTrue(
            kvant.Scheme(k="int-4:center=file", model=model, like=scheme, **SHAPE).calibrated
        )
        foreign = kvant.Scheme("balanced", model=other, **SHAPE)
        self.assertFalse(foreign.calibrated)
        self.assertIn("other.kvcal", foreign.not_used)
        self.refused(OSError, "nowhere.gguf", kvant.model_fingerprint, self.folder / "nowhere.gguf")

    def test_codecs_outlive_the_scheme_object(self):
        codecs = kvant.Scheme(k="int-4", **SHAPE).codecs(0, "k")
        rows = normal(1, 64, 64)
        self.assertEqual(
            codecs[0].encode(rows).tobytes(), kvant.Codec("int-4", 64).encode(rows).tobytes()
        )

    def test_refusals(self):
        self.refused(kvant.Error, "no preset 'large'", kvant.Scheme, "large", **SHAPE)
        self.refused(
            kvant.Error, "int-99", lambda: kvant.Scheme(k="int-99", **SHAPE).codecs(0, "k")
        )
        self.refused(kvant.Error, "/nowhere", kvant.Scheme, settings="/nowhere.kvant", **SHAPE)
        self.refused(kvant.Error, "scheme", kvant.Scheme, "small", k="int-4", **SHAPE)
        self.refused(ValueError, "layer: 3", kvant.Scheme(**SHAPE).codecs, 3, "k")
        self.refused(ValueError, "role: ", kvant.Scheme(**SHAPE).codecs, 0, "q")
        self.refused(
            TypeError,
            "calibration: ",
            kvant.Scheme,
            calibration=kvant.Calibration(VECTORS),
            **SHAPE,
        )


class Calibration(WithFolder):
    def gather(self):
        calibrator = kvant.Calibrator("a model", clusters=[4, 16], seed=3)
        keys = normal(1, 300, 2, 32)
        calibrator.add_rows(0, "k", keys[:100])
        calibrator.add_rows(0, "k", keys[100:])
        calibrator.add_rows(0, "v", normal(2, 300, 2, 32))
        self.queries = normal(3, 50, 32)
        calibrator.add_queries(0, 1, self.queries)
        calibrator.add_attention(
            0, 1, keys[:64, 1], self.queries[:3], mask=np.zeros((3, 64), np.float32)
        )
        self.keys = keys
        return calibrator

    def test_statistics_are_those_of_the_rows(self):
        left, calibrator = [], self.gather()
        calibration = calibrator.finish(left.append)
        self.assertEqual(left[-1], 0)
        info = calibration.info
        self.assertEqual(
            (info.model, info.n_layers, info.n_kv_heads, info.head_dim), ("a model", 1, 2, 32)
        )
        self.assertEqual((info.n_tokens, info.clusters), (300, (4, 16)))
        entry = calibration.entry(0, 1)
        keys = self.keys[:, 1].astype(np.float64)
        self.assertTrue(np.allclose(entry.mean, keys.mean(0), rtol=0, atol=2.0**-23))
        self.assertTrue(np.array_equal(entry.min, self.keys[:, 1].min(0)))
        self.assertTrue(np.array_equal(entry.max, self.keys[:, 1].max(0)))
        moment = self.queries.astype(np.float64).T @ self.queries / 50
        self.assertTrue(
            np.allclose(entry.query_moment, moment, rtol=0, atol=2.0**-22 * moment.max())
        )
        self.assertEqual([c.shape for c in entry.centroids], [(4, 32), (16, 32)])
        self.assertEqual((entry.diagonal.shape, entry.matrix.shape), ((32,), (32 * 33 // 2,)))
        self.assertIsNone(calibration.entry(0, 0, "v").query_moment)
        self.refused(IndexError, "layer 1", calibration.entry, 1, 0)

    def test_attention_weighs_the_keys(self):
        """Hidden keys count as if they were not there. Which keys count changes the matrix."""
        keys, queries, made = normal(5, 64, 1, 16), normal(6, 4, 16), []
        hidden = np.zeros((4, 64), np.float32)
        hidden[:, 20:] = -np.inf
        for given in (
            (keys[:, 0], queries, hidden),
            (keys[:20, 0], queries),
            (keys[:, 0], queries),
        ):
            calibrator = kvant.Calibrator()
            calibrator.add_rows(0, "k", keys)
            calibrator.add_queries(0, 0, queries)
            calibrator.add_attention(0, 0, *given)
            made.append(calibrator.finish().entry(0, 0).matrix)
        self.assertTrue(np.array_equal(made[0], made[1]))
        self.assertFalse(np.array_equal(made[0], made[2]))

    def test_files_come_back(self):
        calibration, path = self.gather().finish(), self.folder / "model.kvcal"
        calibration.save(path)
        again = kvant.Calibration(path)
        self.assertEqual(again.info, calibration.info)
        rows = normal(4, 64, 32)
        specs = ("turboquant-4:transform=file", "int-4:center=file,norm=file")
        for spec in specs:
            pages = [
                kvant.Codec(spec, 32, "k", c, kv_head=1).encode(rows).tobytes()
                for c in (calibration, again)
            ]
            self.assertEqual(*pages)
            other = kvant.Codec(spec, 32, "k", again, kv_head=0)
            self.assertNotEqual(
                other.fingerprint, kvant.Codec(spec, 32, "k", again, kv_head=1).fingerprint
            )
        cache = kvant.Cache(1, 4, 2, 32, 64, calibration=path)
        self.assertTrue(cache.info.calibrated)

    def test_refusals(self):
        path = self.folder / "model.kvcal"
        path.write_bytes(VECTORS.read_bytes()[:-1])
        self.assertEqual(
            self.refused(kvant.Error, "model.kvcal", kvant.Calibration, path).status, 70
        )
        self.assertEqual(
            self.refused(kvant.Error, "/nowhere", kvant.Calibration, "/nowhere.kvcal").status, 71
        )
        self.refused(TypeError, "path", kvant.Calibration, None)
        calibration = kvant.Calibration(VECTORS)
        self.refused(
            kvant.Error,
            "codec",
            kvant.Codec,
            "int-4:center=file",
            calibration.info.head_dim * 2,
            "k",
            calibration,
        )
        self.refused(kvant.Error, "calibration", kvant.Calibrator().finish)
        calibrator, rows = kvant.Calibrator(), normal(1, 4, 2, 32)
        self.refused(ValueError, "rows: |[n, n, n]", calibrator.add_rows, 0, "k", rows[:, 0])
        self.refused(kvant.Error, "queries of layer 0", calibrator.add_queries, 0, 0, rows[:, 0])
        rows[2, 1, 3] = np.nan
        self.assertEqual(
            self.refused(kvant.Error, "layer 0", calibrator.add_rows, 0, "k", rows).status, 50
        )


if __name__ == "__main__":
    unittest.main()
