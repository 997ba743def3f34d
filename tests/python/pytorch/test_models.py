"""kvant.calibrate, kvant.evaluate and kvant.tune on tiny models."""

import itertools
import math
import pathlib
import tempfile
import unittest
import unittest.mock

import models
import torch
from common import TestCase, np

import kvant


def text(n, seed=1):
    return torch.randint(3, 300, (n,), generator=torch.Generator().manual_seed(seed))


class Calibrate(TestCase):
    def test_statistics_are_those_of_the_models_rows(self):
        """A calibration of the stock cache's rows and of the queries that a hook of the projection
        saw.
        """
        for kind in ("llama", "qwen2", "gemma3_text", "gpt_oss"):
            model = models.make(kind, "eager")
            calibration = kvant.calibrate(model, text(300), context=100, clusters=(16,))
            self.assertEqual(model.config._attn_implementation, "eager")
            self.assertEqual((calibration.info.n_layers, calibration.info.n_tokens), (4, 300))
            self.assertEqual(calibration.info.model, model.config.model_type)
            with torch.no_grad():
                caches = [
                    model(part[None], use_cache=True).past_key_values
                    for part in text(300).split(100)
                ]
            for layer in (1, 3):  # layers without a window
                for role in "kv":
                    stored = [
                        cache.layers[layer].keys if role == "k" else cache.layers[layer].values
                        for cache in caches
                    ]
                    if stored[0].shape[2] < 100:
                        continue
                    rows = torch.cat(stored, 2)[0, 0].numpy()
                    entry = calibration.entry(layer, 0, role)
                    for found, wanted in zip(entry[:3], (rows.mean(0), rows.min(0), rows.max(0))):
                        self.assertTrue(
                            np.allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(rows).max()),
                            (kind, layer, role),
                        )

    def test_moments_of_queries(self):
        """Without RoPE, q is the projection's output. Both query heads of a kv head count."""
        model, seen = models.make("llama", "eager"), {}

        def attend(module, query, key, value, mask, **options):
            seen[module.layer_idx] = query[0].double()
            return original(module, query, key, value, mask, **options)

        from transformers.models.llama import modeling_llama

        original = modeling_llama.eager_attention_forward
        with (
            torch.no_grad(),
            unittest.mock.patch.object(modeling_llama, "eager_attention_forward", attend),
        ):
            model(text(64)[None])
        calibration = kvant.calibrate(model, text(64))
        for layer in range(4):
            for head in range(2):
                q = seen[layer][2 * head : 2 * head + 2].reshape(-1, 16)
                moment = (q.T @ q / len(q)).numpy()
                found = calibration.entry(layer, head).query_moment
                self.assertTrue(
                    np.allclose(found, moment, rtol=0, atol=1e-5 * np.abs(moment).max())
                )

    def test_rows_give_what_sums_give(self):
        """The library's own sums of the same rows, queries and attention. Weights of float32 scores
        are within 2^-16 of themselves. The geometric mean keeps that factor in the order of
        symmetric matrices. So W moves by less than 2^-16 of its norm, and by a step of binary16.
        """
        model, seen = models.make("llama", "eager"), []
        from transformers.models.llama import modeling_llama

        def attend(module, query, key, value, mask, **options):
            seen.append(
                (
                    module.layer_idx,
                    query[0].numpy(),
                    key[0].numpy(),
                    value[0].numpy(),
                    mask[0, 0].numpy(),
                )
            )
            return original(module, query, key, value, mask, **options)

        original = modeling_llama.eager_attention_forward
        with (
            torch.no_grad(),
            unittest.mock.patch.object(modeling_llama, "eager_attention_forward", attend),
        ):
            for part in text(300).split(150):
                model(part[None])
        wanted = kvant.Calibrator(clusters=(16,))
        for layer, q, k, v, mask in seen:
            wanted.add_rows(layer, "k", k.transpose(1, 0, 2))
            wanted.add_rows(layer, "v", v.transpose(1, 0, 2))
            for head in range(4):
                wanted.add_queries(layer, head // 2, q[head])
                wanted.add_attention(
                    layer, head // 2, k[head // 2], q[head, 15::16], mask[15::16], n_exact=64
                )
        wanted = wanted.finish()
        found = kvant.calibrate(model, text(300), context=150, clusters=(16,))
        for layer, head, role in itertools.product(range(4), range(2), "kv"):
            a, b = (c.entry(layer, head, role) for c in (wanted, found))
            for x, y in zip((a.min, a.max, *a.centroids), (b.min, b.max, *b.centroids)):
                self.assertTrue(np.array_equal(x, y))
            step = 2.0**-23
            self.assertTrue(np.allclose(a.mean, b.mean, rtol=step, atol=1e-9))
            if role == "k":
                self.assertTrue(np.allclose(a.query_moment, b.query_moment, rtol=step, atol=1e-9))
                self.assertTrue(np.allclose(a.diagonal, b.diagonal, rtol=2.0**-16))
                x, y = a.matrix.astype(float), b.matrix.astype(float)
                self.assertTrue(
                    np.all(abs(x - y) <= 2.0**-10 * abs(x) + 2.0**-16 * np.sqrt(2 * (x * x).sum()))
                )

    def test_positions_turn_keys(self):
        """The second context begins at position 500 instead of 0. Only RoPE changes its keys, in
        pairs (i, i + 8).
        """
        model = models.make("llama")
        first, both, spread = (
            kvant.calibrate(model, text(128)[:n], context=64, positions=positions)
            for n, positions in ((64, 0), (128, 0), (128, 564))
        )
        angle = 500 * model.model.rotary_emb.inv_freq.double().numpy()
        for layer, head in itertools.product(range(4), range(2)):
            rest = 2.0 * both.entry(layer, head).mean - first.entry(layer, head).mean
            a, b = rest[:8], rest[8:]
            turned = np.concatenate(
                [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
            )
            wanted = (first.entry(layer, head).mean + turned) / 2
            found = spread.entry(layer, head).mean
            self.assertTrue(np.allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max()))
            self.assertFalse(
                np.allclose(
                    found, both.entry(layer, head).mean, rtol=0, atol=1e-2 * np.abs(wanted).max()
                )
            )
            values = (x.entry(layer, head, "v").mean for x in (both, spread))
            self.assertTrue(np.allclose(*values, rtol=0, atol=1e-4))

    def test_a_cache_uses_it(self):
        model = models.make("llama")
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "model.kvcal")
            seen = []
            kvant.calibrate(model, text(600), progress=seen.append).save(path)
            self.assertEqual((seen, seen[-1]), (sorted(seen), 1.0))
            plain, calibrated = kvant.evaluate(
                model,
                text(1024, 2),
                None,
                ["small", {"preset": "small", "calibration": path}],
                context=512,
            )[1:]
            self.assertNotEqual(plain.kld, calibrated.kld)
            self.assertTrue(
                np.isfinite(
                    kvant.evaluate(
                        model.to(torch.bfloat16),
                        text(512, 2),
                        None,
                        [{"calibration": path}],
                        context=512,
                    )[1].kld
                )
            )
            tuned = models.make("llama")
            with torch.no_grad():
                for weights in tuned.model.layers[0].self_attn.parameters():
                    weights *= 1 + 0.01 * torch.randn(
                        weights.shape, generator=torch.Generator().manual_seed(2)
                    )
            self.refused(
                ValueError,
                "calibration|weights",
                kvant.evaluate,
                tuned,
                text(512, 2),
                None,
                [{"calibration": path}],
                context=512,
            )

    def test_refusals(self):
        model = models.make("llama")
        self.refused(
            ValueError, "texts: 100 tokens|256", kvant.calibrate, model, text(100), clusters=(256,)
        )
        self.refused(TypeError, "tokenizer", kvant.calibrate, model, "a text")
        self.refused(TypeError, "token ids|float32", kvant.calibrate, model, torch.rand(300))
        ids = text(300).numpy()
        self.assertEqual(
            kvant.calibrate(model, ids).info.checksum,
            kvant.calibrate(model, text(300)).info.checksum,
        )


class Evaluate(TestCase):
    def test_figures(self):
        """The stock cache's perplexity follows from the model's own loss. An exact codec has no
        divergence, and fewer bits diverge more.
        """
        model = models.make("qwen2", "eager")
        caches = [
            {"k": "f32", "v": "f32"},
            *({"k": f"int-{bits}", "v": f"int-{bits}"} for bits in (8, 4, 2)),
        ]
        rows = kvant.evaluate(model, text(300), None, caches, context=100, n_contexts=3)
        self.assertEqual(model.config._attn_implementation, "eager")
        self.assertEqual(
            [row.name for row in rows],
            ["stock", "k=f32 v=f32", "k=int-8 v=int-8", "k=int-4 v=int-4", "k=int-2 v=int-2"],
        )
        with torch.no_grad():
            losses = []
            for part in text(300).split(100):
                labels = part.clone()
                labels[:51] = -100  # row 50 is the first row that is scored: it predicts token 51
                losses.append(float(model(part[None], labels=labels[None]).loss))
        self.assertAlmostEqual(
            rows[0].perplexity, math.exp(sum(losses) / 3), delta=1e-4 * rows[0].perplexity
        )
        self.assertEqual((rows[0].kld, rows[0].same_top), (0, 1))
        self.assertLess(abs(rows[1].kld), 1e-5)
        self.assertLess(rows[2].kld, rows[3].kld)
        self.assertLess(rows[3].kld, rows[4].kld)
        self.assertLess(rows[4].bytes, rows[3].bytes)
        for row in rows:
            self.assertEqual(row.f16_bytes, 4 * 100 * 2 * 16 * 2)
        self.assertEqual(rows[0].bytes, 2 * rows[0].f16_bytes)  # the model is float32

    def test_texts(self):
        class Letters:
            bos_token_id, add_bos_token = 7, True

            def __call__(self, words, add_special_tokens):
                return {"input_ids": [3 + ord(letter) % 290 for letter in words]}

        model = models.make("llama")
        found = kvant.evaluate(
            model, ["some words " * 20, "and more " * 20], Letters(), [], context=64, n_contexts=2
        )
        ids = torch.tensor(Letters()("some words " * 20, False)["input_ids"][:128])
        ids[[0, 64]] = 7
        self.assertEqual(found, kvant.evaluate(model, ids, None, [], context=64))
        self.refused(ValueError, "fewer tokens", kvant.evaluate, model, text(10))
        self.refused(
            ValueError, "first: 63", kvant.evaluate, model, ids, None, [], context=64, first=63
        )


class Tune(TestCase):
    """Codecs of turboquant at head_dim 64, whose scale adds a quarter of a bit."""

    CODECS = [f"turboquant-{bits}" for bits in (4, 5, 6, 8)]

    def tuned(self, model, bits, **options):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = pathlib.Path(folder.name, "model.kvant")
        found = kvant.tune(
            model,
            text(2048),
            bits=bits,
            path=path,
            n_ctx=1024,
            context=1024,
            n_contexts=2,
            k=self.CODECS,
            v=self.CODECS,
            **options,
        )
        return path, found

    def test_bits_go_where_they_matter(self):
        """Layer 2 has no output, so it needs no bits, and the remaining layers share its bits."""
        model = models.make("llama", "eager", head_dim=64)
        with torch.no_grad():
            model.model.layers[2].self_attn.o_proj.weight.zero_()
        # Some of the 16 blocks of 1024 tokens have a page of 16 bits per number, too.
        scheme = kvant.Scheme("balanced", n_layers=4, n_kv_heads=2, head_dim=64)
        exact = scheme.exact(1024)
        # The 8 pages for the rows of a write belong to 4 layers together.
        opened = exact.total // 64 + 1 + 8 // 4
        path, expected = self.tuned(model, 5.5 + opened)
        self.assertEqual(model.config._attn_implementation, "eager")
        settings = kvant.Settings.load(path)
        specs = {
            (layer, role): settings.layer(layer, role)[0] for layer in range(4) for role in "kv"
        }
        self.assertEqual((specs[2, "k"], specs[2, "v"]), ("turboquant-4", "turboquant-4"))
        heads = {
            site: spec if isinstance(spec, tuple) else (spec,) * 2 for site, spec in specs.items()
        }
        bits = [int(spec[-1]) + 0.25 for of_site in heads.values() for spec in of_site]
        self.assertTrue(
            5.5 - 2 / 16 < sum(bits) / len(bits) <= 5.5
        )  # a step is at most 2 bits of one kv head
        uniform = path.with_name("uniform.kvant")
        kvant.Settings([(("turboquant-5", 2, 64),) * 2] * 4, model="tiny").save(uniform)
        caches = [{"settings": path}, {"settings": uniform}]
        rows = kvant.evaluate(model, text(1024, 2), None, caches, context=1024)
        tuned = kvant.Scheme(settings=path, n_layers=4, n_kv_heads=2, head_dim=64)
        self.assertEqual(tuned.exact(1024), exact)
        numbers = 1024 * 4 * 2 * 2 * 64
        self.assertEqual(tuned.context_bytes(1024), (sum(bits) / len(bits) + opened) / 8 * numbers)
        self.assertTrue(0 < opened < 8)
        # Blocks in use count once. Two blocks of a layer are fp16: its first and its newest. The
        # layer that was written last also has the pages that all layers share. The last 512 rows
        # are one write, which these pages hold, and the newest rows before it are fp16, too.
        n_open = [2, 2, 2, 1 + 1 + 8]
        whole = sum(
            n_open[layer] * 16 + (16 - n_open[layer]) * (int(spec[-1]) + 0.25)
            for (layer, _), of_site in heads.items()
            for spec in of_site
        )
        self.assertEqual(rows[1].bytes * 16 / rows[1].f16_bytes, whole / 16 / len(bits))
        self.assertLess(rows[1].kld, rows[2].kld)  # from 5.5 bits to 5.25
        self.assertTrue(rows[1].kld / 3 < expected < 3 * rows[1].kld, (rows[1], expected))

    def test_windows_softcaps_and_calibrations(self):
        # Each layer has fp16 pages for 3 of the 10 blocks of 640 tokens. The layers of gemma2 are
        # in two caches of two layers, all other models in one cache of four. So a write's 8 pages
        # are 4 or 2 of a layer.
        for kind, pages in (("gemma2", 3 + 4), ("mistral", 3 + 2), ("qwen2", 3 + 2)):
            model = models.make(kind)
            with tempfile.TemporaryDirectory() as folder:
                calibration = pathlib.Path(folder, "model.kvcal")
                kvant.calibrate(model, text(600)).save(calibration)
                path = pathlib.Path(folder, "model.kvant")
                options = dict(k=["int-2:center=file", "int-4"], v=["int-2", "int-4"])
                options |= dict(bits=16 * pages / 10 + 5.6)
                options |= dict(context=640, n_ctx=640, path=path, calibration=calibration)
                found = kvant.tune(model, text(1280), **options)
                self.assertTrue(0 < found < math.inf)
                self.assertTrue(
                    kvant.evaluate(model, text(512, 2), None, [{"settings": path}], context=512)[
                        1
                    ].kld
                    > 0
                )

    def test_refusals(self):
        model = models.make("llama")
        self.refused(ValueError, "fewer tokens", kvant.tune, model, text(100), bits=4, path="x")
        # All of the 256 tokens are fp16: the first block, two for the newest 64 tokens, and a
        # write's block.
        short = dict(bits=4, path="x", context=512)
        self.refused(ValueError, "context: |fp16|640", kvant.tune, model, text(512), **short)
        self.refused(ValueError, "bits: the smallest", self.tuned, model, 1)
        self.refused(ValueError, "its attention has sinks", self.tuned, models.make("gpt_oss"), 4)


if __name__ == "__main__":
    unittest.main()
