"""The data that a KvantCache keeps: rows that can be read, files and pickles, a calibration's
weights. Also the warnings when nothing is compressed.
"""

import io
import os
import pathlib
import pickle
import tempfile
import unittest
import warnings
from unittest import mock

import models
import torch
from common import TestCase
from transformers.cache_utils import DynamicCache

import kvant
from kvant.transformers import KvantCache, saving
from kvant.transformers.attention import warn_of_plain_keys
from kvant.transformers.store import Sequences

IMPLEMENTATIONS = ("kvant", "sdpa", "eager")


def filled(model, cache, n=200, padding=30):
    tokens, mask = models.prompt(n, padding=padding)
    with torch.no_grad():
        model(tokens, attention_mask=mask, past_key_values=cache)
    return tokens, mask


def more(model, cache, mask, n=9):
    """Logits of n tokens that follow."""
    tokens = models.prompt(n, padding=0, seed=8)[0]
    mask = torch.nn.functional.pad(mask, (0, n), value=1)
    with torch.no_grad():
        return model(tokens, attention_mask=mask, past_key_values=cache).logits


def warned(call):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in said if "kvant" in str(one.message).lower()]


class Rows(TestCase):
    def test_keys_and_values_can_be_read(self):
        stock, ours = models.twins("gemma2", "eager", "kvant")
        wanted, cache = DynamicCache(config=stock.config), KvantCache(ours.config, k="f32", v="f32")
        self.assertFalse(cache.is_initialized)
        self.assertEqual([layer.keys for layer in cache.layers], [None] * 4)
        for model, one in ((stock, wanted), (ours, cache)):
            filled(model, one, 12, 0)
        self.assertTrue(cache.is_initialized)
        for layer, (k, v, _), (found_k, found_v, _) in zip(cache.layers, wanted, cache):
            for x, y in ((found_k, k), (found_v, v)):
                self.assertTrue(torch.allclose(x, y, rtol=0, atol=1e-5 * y.abs().max()))
            self.assertEqual((layer.dtype, layer.device), (k.dtype, k.device))

    def test_what_cannot_be_done_with_them_is_an_error(self):
        model = models.make("llama")
        cache = KvantCache(model.config)
        filled(model, cache)
        for name in ("keys", "values"):
            rows = getattr(cache.layers[1], name)[:, :, 100:]
            self.refused(
                AttributeError,
                "KvantCache|not assigned|DynamicCache",
                setattr,
                cache.layers[1],
                name,
                rows,
            )
        for move in (cache.offload, cache.prefetch):
            self.refused(RuntimeError, "KvantCache|not offloaded", move, 0)
        self.assertEqual(cache.get_seq_length(), 200)

    def test_flex_attention(self):
        """flex_attention is compiled, and accepts only plain tensors. A plain function in place of
        the compiler's saves minutes.
        """
        stock, ours = models.twins("llama", "eager", "flex_attention")
        cache = KvantCache(ours.config, k="f32", v="f32")
        rows = torch.ones(1, 2, 3, 16)
        with torch.no_grad():
            found = cache.layers[0].update(rows, rows)
        self.assertEqual([type(x) for x in found], [torch.Tensor] * 2)
        self.assertTrue(torch.equal(found[0], rows))

    def test_an_object_that_was_never_made_is_freed(self):
        """torch.compile makes such tensors."""
        with mock.patch("sys.unraisablehook") as hook:
            for kind in (Sequences, kvant.Cache, kvant.Codec):
                kind.__new__(kind)
        hook.assert_not_called()


class Calibrated(TestCase):
    """A calibration belongs to the weights that it was made with, for any attention."""

    def test_weights(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "model.kvcal")
            kvant.calibrate(models.make("llama"), models.prompt(600, 1, 0)[0]).save(path)
            for implementation in IMPLEMENTATIONS:
                with self.subTest(implementation=implementation):
                    own = models.make("llama", implementation)
                    other = models.make("llama", implementation, seed=5)
                    cache = KvantCache(own.config, calibration=path)
                    for _ in range(2):
                        self.refused(ValueError, "calibration|other weights", filled, other, cache)
                    self.assertEqual(cache.get_seq_length(), 0)
                    filled(own, cache)
                    self.assertEqual(cache.get_seq_length(), 200)


class Words(TestCase):
    """The user gets one warning that nothing is compressed."""

    HYBRID = dict(
        mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16
    )

    def config(self, kind, **options):
        with mock.patch.dict(models.KINDS, {kind: options}):
            return models.make(kind).config

    def test_layers_that_stay_as_they_are(self):
        for kind, options, count in (("falcon_h1", self.HYBRID, "0 of 4"), ("mamba", {}, "0 of 4")):
            said = warned(lambda: KvantCache(self.config(kind, **options)))
            self.assertEqual(len(said), 1, said)
            self.assertIn(f"KvantCache compresses {count} layers of {kind}", said[0])
        for kind in models.KINDS:
            self.assertEqual(warned(lambda: KvantCache(models.make(kind).config)), [])

    def test_a_forgotten_cache(self):
        model, (tokens, mask) = models.make("llama"), models.prompt()
        options = dict(attention_mask=mask, max_new_tokens=4, pad_token_id=0)
        warn_of_plain_keys.cache_clear()
        self.assertEqual(
            warned(
                lambda: model.generate(tokens, past_key_values=KvantCache(model.config), **options)
            ),
            [],
        )
        self.assertEqual(warned(lambda: model.generate(tokens, use_cache=False, **options)), [])
        said = warned(lambda: [model.generate(tokens, **options) for _ in range(2)])
        self.assertEqual(len(said), 1, said)
        self.assertIn("past_key_values=kvant.transformers.KvantCache(model.config)", said[0])


class Saved(TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.path = self.folder / "prompt.kv"

    def copies(self, cache, config):
        """A cache survives a file, pickle and torch.save."""
        cache.save(self.path)
        yield KvantCache.load(self.path, config)
        yield pickle.loads(pickle.dumps(cache))
        held = io.BytesIO()
        torch.save(cache, held)
        held.seek(0)
        yield torch.load(held, weights_only=False)

    def test_a_copy_goes_on_as_the_cache_does(self):
        """Caches with padding, with windows that dropped blocks, and with a last block that is not
        full. The pages have the same bytes, so rows are equal. With exact codecs, everything after
        them is equal, too. Presets begin to learn again.
        """
        for kind, n in (("llama", 200), ("mistral", 700), ("gemma2", 200)):
            for options in ({"k": "f32", "v": "f32"}, {"k": "turboquant-4", "v": "int-4"}, {}):
                with self.subTest(kind=kind, **options):
                    model = models.make(kind)
                    cache = KvantCache(model.config, **options)
                    _, mask = filled(model, cache, n)
                    if kind == "mistral":  # a call after which the cache drops blocks
                        more(model, cache, mask)
                        mask = torch.nn.functional.pad(mask, (0, 9), value=1)
                    copies = list(self.copies(cache, model.config))
                    rows, wanted = list(cache), more(model, cache, mask)
                    for made in copies:
                        self.assertEqual(
                            (made._stored, made.get_seq_length()),
                            (cache._stored, cache.get_seq_length() - 9),
                        )
                        for layer, other in zip(made, rows):
                            self.assertTrue(
                                torch.equal(layer[0], other[0]) and torch.equal(layer[1], other[1])
                            )
                        found = more(model, made, mask)
                        self.assertTrue(torch.equal(found, wanted) or not options)

    def test_an_empty_cache_and_a_copy_of_a_copy(self):
        model = models.make("llama")
        empty = KvantCache(model.config, "small", max_tokens=512)
        for made in self.copies(empty, model.config):
            self.assertEqual((made.get_seq_length(), made._stored["preset"]), (0, "small"))
        made, *_ = self.copies(empty, model.config)
        _, mask = filled(model, made)
        again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(made))))
        self.assertTrue(torch.equal(more(model, again, mask), more(model, made, mask)))

    def test_damaged_files(self):
        model = models.make("llama")
        cache = KvantCache(model.config)
        filled(model, cache)
        cache.save(self.path)
        data = self.path.read_bytes()
        generator = torch.Generator().manual_seed(1)
        places = torch.randint(8, len(data), (40,), generator=generator).tolist() + [
            8,
            len(data) - 1,
        ]
        damaged = [data[:n] for n in (0, 7, 16, 47, 48, 100, len(data) - 1)] + [data + b"x"]
        damaged += [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in places]
        for one in damaged:
            self.path.write_bytes(one)
            self.refused(
                ValueError, "KvantCache: |damaged", KvantCache.load, self.path, model.config
            )
        self.path.write_bytes(b"kvantkv2" + data[8:])
        self.refused(ValueError, "another version", KvantCache.load, self.path, model.config)

    def test_a_head_that_lies(self):
        """A damaged file with the right checksum, as an attacker would write it: no length in it is
        trusted.
        """
        model = models.make("llama")
        cache = KvantCache(model.config, k="f32", v="f32")
        filled(model, cache)
        head, blocks = saving.parse(saving.to_bytes(cache))
        store = head["stores"][0]
        lies = [
            {"length": 10**9},
            {"length": 199},
            {"starts": [0, 0]},
            {"starts": [0]},
            {"layers": [0, 1, 2, 9]},
            {"layers": []},
        ]
        lies += [
            {"blocks": store["blocks"][:1]},
            {"shape": [2, 16]},
            {"shape": [1, 32, 16]},
            {"shape": [-1, 16, 16]},
            {"dtype": "int4"},
            {"starts": 3},
        ]
        first, second, *others = store["blocks"][0]
        lies += [
            {"blocks": [[first - 1, second + 1, *others], store["blocks"][1]]},
            {"length": "x"},
            {"length": float("inf")},
            {"layers": [0]},
        ]
        lies = [{"stores": [store | lie]} for lie in lies]
        lies += [{"stored": x} for x in (3, [0], None, {"k": 3}, {"max_tokens": 64}, {"x": "y"})]
        for lie in [*lies, {"model": []}, {"weights": None}]:
            made = saving.packed(head | lie, [bytes(blocks)])
            with self.subTest(**lie), self.assertRaises((ValueError, kvant.Error)):
                self.path.write_bytes(made)
                KvantCache.load(self.path, model.config)
        with mock.patch.object(saving.json, "dumps", lambda head: "[" * 200000):
            self.refused(ValueError, "cannot be read", saving.parse, saving.packed({}, []))

    def test_other_models_are_refused(self):
        model = models.make("llama")
        cache = KvantCache(model.config)
        _, mask = filled(model, cache)
        cache.save(self.path)
        for options, name in (
            (dict(num_key_value_heads=4), "num_key_value_heads"),
            (dict(num_hidden_layers=5), "num_hidden_layers"),
        ):
            other = models.make("llama", **options).config
            self.refused(
                ValueError, f"{name}|in the file|in the model", KvantCache.load, self.path, other
            )
        self.refused(
            ValueError, "model_type", KvantCache.load, self.path, models.make("qwen2").config
        )
        self.refused(
            kvant.Error,
            "import",
            KvantCache.load,
            self.path,
            model.config,
            preset=None,
            k="int-4",
            v="int-4",
        )
        for implementation in IMPLEMENTATIONS:
            other = models.make("llama", implementation, seed=5)
            loaded = KvantCache.load(self.path, model.config)
            self.refused(ValueError, "saved with|other weights", more, other, loaded, mask)

    def test_a_write_that_fails_leaves_the_old_file(self):
        model = models.make("llama")
        cache = KvantCache(model.config)
        cache.save(self.path)
        before = self.path.read_bytes()
        filled(model, cache)
        with mock.patch.object(os, "fsync", side_effect=OSError(28, "no space left")):
            self.refused(OSError, "no space", cache.save, self.path)
        self.assertEqual((self.path.read_bytes(), os.listdir(self.folder)), (before, ["prompt.kv"]))

    def test_layers_of_other_kinds_are_not_saved(self):
        with mock.patch.dict(models.KINDS, {"falcon_h1": Words.HYBRID}), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cache = KvantCache(models.make("falcon_h1").config)
        self.refused(TypeError, "cannot be saved", cache.save, self.path)
        self.assertFalse(self.path.exists())


class Compiled(TestCase):
    def test_a_compiled_model_gives_the_same_logits(self):
        # Tracing takes as long for each layer, so there are only two.
        model, tokens = models.make("llama", num_hidden_layers=2), models.prompt(40, 1, 0)[0]
        compiled = torch.compile(model, backend="eager")
        caches = [KvantCache(model.config, k="f32", v="f32") for _ in range(2)]
        for part in (slice(0, 30), slice(30, 31), slice(31, 32)):
            with torch.no_grad():
                found = compiled(tokens[:, part], past_key_values=caches[0]).logits
                want = model(tokens[:, part], past_key_values=caches[1]).logits
            self.assertLess(float((found - want).abs().max()), 1e-5)  # sums in one order or another


if __name__ == "__main__":
    unittest.main()
