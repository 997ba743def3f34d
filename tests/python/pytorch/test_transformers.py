"""KvantCache in transformers: with an exact codec the stock cache's tokens in every generation
mode, with other codecs attention within its bound, and errors instead of wrong tokens.
"""

import copy
import pathlib
import tempfile
import unittest
from unittest import mock

import models
import torch
from common import TestCase
from transformers.cache_utils import DynamicCache

import kvant
from kvant.transformers import KvantCache
from kvant.transformers.layer import KvantLayer
from kvant.transformers.store import SLACK

MODES = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "two samples": {"do_sample": True, "num_return_sequences": 2},
    "chunked prefill": {"prefill_chunk_size": 16},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "assisted": {"assistant_model": None},
}
# Every kind has its two kinds of layers in the first two. Time grows with the layers.
FEW = {"num_hidden_layers": 2}
ALONE = ("prompt lookup", "assisted")  # transformers supports these only for one sequence


def exact(model, **options):
    return KvantCache(model.config, k="f32", v="f32", **options)


def generate(model, mode="greedy", cache=None, new=24, tokens=None, mask=None):
    """Token ids, with the stock cache unless a cache is given."""
    options = dict(MODES[mode])
    if tokens is None:
        tokens, mask = models.prompt()
    if mode in ALONE:
        tokens, mask = tokens[1:], mask[1:]
    if "assistant_model" in options:
        options["assistant_model"] = models.make("llama", "eager", seed=3, **FEW)
    if cache is not None:
        options["past_key_values"] = cache
    torch.manual_seed(5)
    return model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=new,
        min_new_tokens=new,
        pad_token_id=0,
        eos_token_id=None,
        **options,
    )


class Modes(TestCase):
    """An exact codec stores f32 rows. Token ids of two computations of the same numbers could
    differ only where two tokens have the same probability to 6 digits.
    """

    def test_every_mode_of_every_architecture(self):
        for kind in models.KINDS:
            stock, ours = models.twins(kind, "eager", "kvant", **FEW)
            for mode in MODES:
                with self.subTest(kind=kind, mode=mode):
                    self.assertEqual(
                        generate(ours, mode, exact(ours)).tolist(), generate(stock, mode).tolist()
                    )

    def test_other_implementations_decode_the_cache(self):
        for kind, implementation in (("llama", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager")):
            (stock,) = models.twins(kind, implementation, **FEW)
            for mode in MODES:
                with self.subTest(kind=kind, mode=mode):
                    self.assertEqual(
                        generate(stock, mode, exact(stock)).tolist(), generate(stock, mode).tolist()
                    )

    def test_our_attention_takes_other_caches(self):
        for kind in ("llama", "gemma3_text", "gpt_oss"):
            stock, ours = models.twins(kind, "eager", "kvant")
            self.assertEqual(generate(ours).tolist(), generate(stock).tolist())
            tokens, mask = models.prompt()
            with torch.no_grad():
                got, wanted = (
                    m(tokens, attention_mask=mask, use_cache=False).logits[1] for m in (ours, stock)
                )
            self.assertTrue(torch.allclose(got, wanted, rtol=0, atol=1e-4 * wanted.abs().max()))

    def test_tokens_depend_on_the_cache(self):
        """A lossy codec gives other tokens. Otherwise the tests above would pass with any cache."""
        for kind in models.KINDS:
            ours = models.make(kind, **FEW)
            ids = generate(ours, "sampling", exact(ours))[:, 40:]
            coarse = generate(ours, "sampling", KvantCache(ours.config, k="int-2", v="int-2"))[
                :, 40:
            ]
            self.assertGreater((ids != coarse).sum(), 4, kind)
            self.assertGreater(len(set(ids.flatten().tolist())), 8, kind)

    def test_layers_of_another_kind_stay(self):
        """A hybrid of Mamba and attention: transformers keeps the state of the Mamba layers."""
        config = dict(
            mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16
        )
        try:
            models.KINDS["falcon_h1"] = config
            stock, ours = models.twins("falcon_h1", "eager", "kvant")
            self.assertEqual(generate(ours, cache=exact(ours)).tolist(), generate(stock).tolist())
        finally:
            del models.KINDS["falcon_h1"]

    def test_half_precision(self):
        """KvantCache is not further from binary32 than the stock cache, whose attention computes in
        half precision, too.
        """
        tokens = models.prompt()[0]
        with torch.no_grad():
            wanted = models.make("llama", "eager")(tokens).logits
            for dtype in (torch.float16, torch.bfloat16):
                stock, ours = (model.to(dtype) for model in models.twins("llama", "eager", "kvant"))
                logits = ours(tokens, past_key_values=exact(ours)).logits
                self.assertEqual(logits.dtype, dtype)
                errors = [
                    (x.float() - wanted).square().mean().sqrt()
                    for x in (logits, stock(tokens).logits)
                ]
                self.assertLess(errors[0], 1.2 * errors[1])


class Conversations(TestCase):
    """Operations of programs on a cache between two calls."""

    def setUp(self):
        self.stock, self.ours = models.twins("gemma2", "eager", "kvant")

    def both(self, use):
        caches = exact(self.ours), DynamicCache(config=self.stock.config)
        return [use(model, cache) for model, cache in zip((self.ours, self.stock), caches)]

    def same(self, use):
        got, wanted = self.both(use)
        self.assertEqual(got.tolist(), wanted.tolist())

    def test_a_second_turn(self):
        def use(model, cache):
            tokens, mask = models.prompt()
            first = generate(model, cache=cache, tokens=tokens, mask=mask)
            tokens = torch.cat([first, models.prompt(9, seed=2)[0]], 1)
            mask = torch.nn.functional.pad(mask, (0, tokens.shape[1] - mask.shape[1]), value=1)
            return generate(model, cache=cache, tokens=tokens, mask=mask)

        self.same(use)

    def test_prompts_in_parts(self):
        """As for a prompt of more than 8192 tokens, with parts of 13 tokens. The padding covers
        three parts.
        """
        tokens, mask = models.prompt(90, padding=41)
        with mock.patch.object(kvant.transformers.layer, "PASS", 13), torch.no_grad():
            got, wanted = self.both(
                lambda model, cache: model(
                    tokens, attention_mask=mask, past_key_values=cache
                ).logits[:, 41:]
            )
            self.assertTrue(torch.allclose(got, wanted, rtol=0, atol=1e-4 * wanted.abs().max()))
            self.same(
                lambda model, cache: generate(model, "beams", cache, tokens=tokens, mask=mask)
            )

    def test_padding_longer_than_a_chunk(self):
        tokens, mask = models.prompt(60, padding=45)
        self.same(
            lambda model, cache: generate(model, "chunked prefill", cache, tokens=tokens, mask=mask)
        )

    def test_a_prefix_that_is_computed_once(self):
        def use(model, cache):
            prefix = models.prompt(33, batch=1, padding=0)[0]
            tokens = models.prompt(10, batch=3, padding=0, seed=2)[0]
            with torch.no_grad():
                model(prefix, past_key_values=cache)
            found = []
            for question in tokens:
                again = copy.deepcopy(cache)
                whole = torch.cat([prefix, question[None]], 1)
                found.append(
                    generate(model, cache=again, tokens=whole, mask=torch.ones_like(whole))
                )
            again = copy.deepcopy(cache)
            again.batch_repeat_interleave(4)
            again.batch_select_indices(torch.tensor([0, 2, 3]))
            whole = torch.cat([prefix.expand(3, -1), tokens], 1)
            found.append(generate(model, cache=again, tokens=whole, mask=torch.ones_like(whole)))
            return torch.cat(found)

        self.same(use)

    def test_copies_share_blocks_and_give_them_back(self):
        cache, tokens = exact(self.ours), models.prompt(200, batch=1, padding=0)[0]
        with torch.no_grad():
            self.ours(tokens, past_key_values=cache)
            before = cache.bytes
            again = copy.deepcopy(cache)
            self.assertEqual(cache.bytes, before)
            self.ours(tokens[:, :1], past_key_values=again)
            grown = cache.bytes
            self.assertLess(before, grown)
            self.assertLess(grown, 1.5 * before)
            del again
        self.assertEqual((cache.bytes, cache.get_seq_length()), (before, 200))

    def test_crop_and_reset(self):
        def use(model, cache):
            tokens = models.prompt(30, batch=1, padding=0)[0]
            with torch.no_grad():
                cache.activate_past_recording()
                model(tokens, past_key_values=cache)
                cache.crop(-6)
                out = model(tokens[:, 24:], past_key_values=cache).logits
                self.assertEqual(cache.get_seq_length(), 30)
                return out[:, -1].argmax(-1)

        self.same(use)
        cache = exact(self.ours)
        first = generate(self.ours, cache=cache)
        cache.reset()
        self.assertEqual((cache.get_seq_length(), cache.bytes), (0, 0))
        self.assertEqual(generate(self.ours, cache=cache).tolist(), first.tolist())

    def test_rows_are_selected_as_rows_of_a_tensor_are(self):
        """Numbers may count from the end and occur twice; a list of booleans is a mask. Each row of
        the result has its own sequence."""
        for rows in ([-1, 1], [0, -2, 1, -1], [True, False], torch.tensor([1, -1]), slice(1, None)):

            @torch.no_grad()
            def use(model, cache, rows=rows):
                tokens = models.prompt(30, batch=2, padding=0)[0]
                model(tokens, past_key_values=cache)
                cache.batch_select_indices(rows)
                more = models.prompt(5, batch=tokens[rows].shape[0], padding=0, seed=4)[0]
                model(more, past_key_values=cache)
                return model(more, past_key_values=cache).logits[:, -1].argmax(-1)

            with self.subTest(rows=rows):
                self.same(use)
        cache = exact(self.ours)
        with torch.no_grad():
            self.ours(models.prompt(30)[0], past_key_values=cache)
        self.assertRaises(IndexError, cache.batch_select_indices, [0, 2])
        self.assertRaises(IndexError, cache.reorder_cache, torch.tensor([2, 0]))
        self.assertEqual(cache.get_seq_length(), 30)
        cache.reset()
        cache.batch_select_indices([0])  # there are no rows, as in a cache of transformers
        cache.reorder_cache(torch.tensor([1, 0]))
        self.assertEqual(cache.get_seq_length(), 0)

    def test_masks_with_holes_and_of_four_dimensions(self):
        tokens, mask = models.prompt()
        mask[1, 10:15] = 0
        square = torch.ones(40, 40, dtype=torch.bool).tril()
        square[:, 5:9] = False
        added = torch.zeros(40, 40).masked_fill(~square, torch.finfo(torch.float32).min)
        for given in (mask, added[None, None].expand(2, 1, 40, 40)):
            with torch.no_grad():
                got, wanted = self.both(
                    lambda model, cache: (
                        model(tokens, attention_mask=given, past_key_values=cache).logits
                    )
                )
            rows = (
                (slice(None), slice(10, None))
                if given.dim() == 4
                else (slice(None), slice(15, None))
            )
            self.assertTrue(
                torch.allclose(
                    got[rows], wanted[rows], rtol=0, atol=1e-4 * wanted[rows].abs().max()
                )
            )

    def test_windows_forget_blocks(self):
        stock, ours = models.twins("mistral", "sdpa", "kvant")
        tokens, mask = models.prompt(700, padding=100)
        cache = exact(ours)
        self.assertEqual(
            generate(ours, cache=cache, new=80, tokens=tokens, mask=mask).tolist(),
            generate(stock, new=80, tokens=tokens, mask=mask).tolist(),
        )
        # a block at either end, and the rows that one pass added
        kept = models.WINDOW + SLACK + 2 * 64 + 80
        self.assertLess(
            cache.bytes, kept / 779 * cache.f16_bytes * 2
        )  # f32 rows are twice as large
        self.refused(RuntimeError, "crop|can remove", cache.crop, -SLACK - 64)  # whole blocks

    def test_windows_that_keep_the_past_until_they_are_cropped(self):
        stock, ours = models.twins("mistral", "sdpa", "kvant")
        tokens = models.prompt(700, batch=1, padding=0)[0]
        cache = exact(ours)
        cache.activate_past_recording()
        with torch.no_grad():
            ours(tokens, past_key_values=cache)
            ours(tokens[:, :10], past_key_values=cache)
            self.assertEqual(
                (cache.get_seq_length(), cache.bytes), (710, 12 * 64 * 4 * 2 * 2 * 16 * 4)
            )
            cache.crop(-400)
            got = ours(tokens[:, :30], past_key_values=cache).logits
            wanted = stock(torch.cat([tokens[:, :310], tokens[:, :30]], 1)).logits[:, 310:]
        self.assertTrue(torch.allclose(got, wanted, rtol=0, atol=1e-4 * wanted.abs().max()))
        self.assertLess(cache.bytes, 7 * 64 * 4 * 2 * 2 * 16 * 4)


def round_trip(spec, role, rows):
    codec, flat = kvant.Codec(spec, 16, role), rows.reshape(-1, 16).float()
    return torch.from_numpy(codec.decode(codec.encode(flat.numpy()), len(flat))).reshape(rows.shape)


class Rounded(TestCase):
    """Lossy codecs."""

    SPECS = ("int-4", "turboquant-4", "trellis-4", "balanced")

    def cache(self, model, spec, **options):
        """Short sequences of a preset are fp16. The preset's specs encode all rows except the first
        64.
        """
        preset = kvant.preset(spec) if spec == "balanced" else None
        stored = {"k": preset.k, "v": preset.v} if preset else {"k": spec, "v": spec}
        return KvantCache(model.config, **stored, **options)

    def test_rows_are_what_the_codec_makes_of_them(self):
        """Two caches hold the same numbers: the stock cache with rows that a Codec encoded and
        decoded, and KvantCache with PyTorch's attention.
        """
        (model,) = models.twins("llama", "eager")

        tokens = models.prompt(100, padding=0)[0]
        with torch.no_grad():
            cache = self.cache(model, "int-4")
            got = model(tokens, past_key_values=cache).logits
            fed = models.RoundTripped(
                model.config, lambda layer, role, rows: round_trip("int-4", role, rows)
            )
            wanted = model(tokens, past_key_values=fed).logits
            exactly = model(tokens).logits
        self.assertTrue(torch.equal(got, wanted))
        self.assertFalse(torch.equal(got, exactly))

    def test_attention_on_pages_is_attention_over_their_rows(self):
        """Checks attention in every layer and for every step. With exact=, it errs by binary32's
        rounding. Otherwise it also errs by the rounding of queries and weights to 16-bit integers
        (codes.h). limit_of() derives both bounds.
        """
        for spec in self.SPECS:
            for flag in (True, False):
                model, worst = models.make("gemma2", attn_logit_softcapping=None), Compare(flag)
                with self.subTest(spec=spec, exact=flag), worst:
                    tokens, mask = models.prompt(150, padding=70)
                    generate(
                        model,
                        cache=self.cache(model, spec, exact=flag),
                        new=4,
                        tokens=tokens,
                        mask=mask,
                    )
                    self.assertEqual(worst.calls, 4 * 4)
                    self.assertLess(worst.ratio, 1)

    def test_settings_of_a_model(self):
        """Each layer has the codec of its number in the model, although layers with and without a
        window lie in different caches. A cache of 512 tokens keeps the first 64 and the newest 64
        rows as fp16. It also keeps 64 rows of a write, and for all three the blocks in which they
        begin. So of 300 tokens, rows 64 .. 107 are never fp16. A row is fp16 before it is encoded.
        """
        model, seen, update = models.make("gemma2", "eager"), {}, KvantLayer.update
        kinds = ["int-8", "int-4", "f32", "int-2"]
        layers = [((kind, 2, 16), (kind, 2, 16)) for kind in kinds]

        def updated(layer, k, v, *others, **named):
            seen.setdefault(layer.number, []).append((k, v))
            return update(layer, k, v, *others, **named)

        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            path = pathlib.Path(folder, "model.kvant")
            kvant.Settings(layers, model="tiny").save(path)
            cache = KvantCache(model.config, settings=path, max_tokens=512)
            tokens = models.prompt(300, batch=1, padding=0)[0]
            with mock.patch.object(KvantLayer, "update", updated):
                for part in tokens.split(64, 1):
                    model(part, past_key_values=cache)
            for layer, kind in zip(cache.layers, kinds):
                for role, rows, given in zip("kv", layer.decoded(300), zip(*seen[layer.number])):
                    given = torch.cat(given, 2)
                    wanted = [given] * 3 if kind == "f32" else [given.half().float()] * 3
                    wanted[1] = round_trip(kind, role, wanted[1])
                    for part, x in zip((slice(64), slice(64, 108), slice(236, 300)), wanted):
                        same = torch.equal(rows[:, :, part], x[:, :, part])
                        self.assertTrue(same, (layer.number, role, part))
            self.assertEqual([store.cache.n_layers for store in cache._stores.values()], [2, 2])
            kvant.Settings(layers[:3], model="tiny").save(path)
            self.refused(
                ValueError, "settings|3 layers, not 4", KvantCache, model.config, settings=path
            )

    def test_memory(self):
        model = models.make("llama")
        cache = self.cache(model, "turboquant-4")
        with torch.no_grad():
            model(models.prompt(640, padding=0)[0], past_key_values=cache)
        self.assertEqual(cache.f16_bytes, 4 * 2 * 640 * 2 * 2 * 16 * 2)
        self.assertTrue(
            all(x.untyped_storage().nbytes() == 0 for layer in cache.layers for x in layer.like)
        )
        codec = kvant.Codec("turboquant-4", 16)
        self.assertEqual(cache.bytes, 4 * 2 * 2 * 2 * 10 * codec.page_bytes)


class Compare:
    """Compares every call of KvantLayer.attend with attention over the rows that its pages decode
    to. ratio: the largest error, in units of the bound.
    """

    def __init__(self, exact):
        self.exact, self.ratio, self.calls = exact, 0.0, 0

    def __enter__(self):
        from kvant.transformers import cache, dense

        self.layer, self.dense, self.attend = cache.KvantLayer, dense, cache.KvantLayer.attend
        compare = self

        def attend(layer, query, mask, shape, length, causal, how):
            out = compare.attend(layer, query, mask, shape, length, causal, how)
            compare.check(layer, out, query, mask, shape, length, how["scale"])
            return out

        self.layer.attend = attend
        return self

    def __exit__(self, *error):
        self.layer.attend = self.attend

    def check(self, layer, out, query, mask, shape, length, scale):
        k, v = (x.double() for x in layer.decoded(length))
        n, query = query.shape[2], query.double()
        added = self.dense.bias(mask, shape.window, True, n, length, query.device).double()
        groups = query.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        weights = torch.softmax(query @ k.transpose(2, 3) * scale + added, -1).nan_to_num(0)
        error = (out.double() - (weights @ v).transpose(1, 2)).abs().amax(3)
        self.ratio = max(
            self.ratio, float((error / self.limit_of(query, k, v, weights, scale, layer)).max())
        )
        self.calls += 1

    def limit_of(self, q, k, v, weights, scale, layer):
        """The bound, as [batch, n, heads].

        As in tests/python/reference.py, a score errs by 2 (d + 20) 2^-24 of the largest score. A
        weighted sum errs by (tokens + d + 40) 2^-24 of the sum of |weight value|. With a scale per
        channel, rotated numbers grow by the spread of scales, which transforms limit to 256. Rows
        minus their centre are at most twice as long.

        Without exact, a query's numbers err by half of 2^-15 of the largest number. A code
        multiplies that by its magnitude, so a score errs by at most d 2^-15 |q| |k|. Weights err
        likewise, per page: by 2^-15 of the largest weight times the value, for each token.
        Codebooks are rounded to as many bits, which adds the same once more.
        """
        d, tokens = q.shape[3], k.shape[2]
        size = (weights @ v.abs()).sum(3).transpose(1, 2)
        score = scale * q.norm(dim=3).amax() * k.norm(dim=3).amax()
        growth = 2 * self.spread(layer)
        limit = (
            2 * (d + 20) * score * growth * 2.0**-24 * size
            + (tokens + d + 40) * growth * 2.0**-24 * size
        )
        if not self.exact:
            limit = limit + 2 * 2 * d * score * growth * 2.0**-15 * size
            largest = weights.amax(3).transpose(1, 2) * v.norm(dim=3).amax() * growth
            limit = limit + 2 * tokens * 2.0**-15 * largest
        return limit.clamp_min(1e-30)

    @staticmethod
    def spread(layer):
        """Rows of this test have such similar channels that scales differ by less than 16."""
        return 16.0 if "transform=first" in repr(layer.owner) else 1.0


class Refusals(TestCase):
    """Errors instead of wrong tokens."""

    def setUp(self):
        self.model = models.make("llama")
        self.tokens, self.mask = models.prompt()

    def test_masks_that_show_what_was_hidden(self):
        cache = exact(self.model)
        with torch.no_grad():
            self.model(self.tokens, attention_mask=self.mask, past_key_values=cache)
            for mask in (None, torch.ones(2, 41)):
                call = lambda: self.model(
                    self.tokens[:, :1], attention_mask=mask, past_key_values=cache
                )  # noqa: E731
                self.refused(ValueError, "attention_mask|hid", call)
                cache.crop(-1)  # the row of the call that failed

    def test_gradients_and_dropout(self):
        call = lambda: self.model(self.tokens, past_key_values=exact(self.model))  # noqa: E731
        self.refused(RuntimeError, "no gradient|torch.no_grad", call)
        training = models.make("llama", attention_dropout=0.5).train()
        with torch.no_grad():
            self.refused(
                ValueError,
                "dropout",
                lambda: training(self.tokens, past_key_values=exact(training)),
            )

    def test_arguments_that_nobody_knows(self):
        layer = self.model.model.layers[0].self_attn
        q = torch.zeros(1, 4, 2, 16)
        bias = {"position_bias": torch.zeros(1)}
        self.refused(
            ValueError, "position_bias", kvant.transformers.attention, layer, q, q, q, None, **bias
        )

    def test_what_it_is_stored_with(self):
        config = self.model.config
        self.refused(ValueError, "no preset 'large'", KvantCache, config, "large")
        self.refused(
            kvant.Error,
            "calibration|missing.kvcal",
            KvantCache,
            config,
            calibration="missing.kvcal",
        )
        self.refused(kvant.Error, "no-such-codec", KvantCache, config, k="no-such-codec")
        self.refused(ValueError, "preset, v|or settings", KvantCache, config, "small", v="int-4")
        self.refused(
            ValueError, "k: |kvant.calibrate", KvantCache, config, k="trellis-4:transform=file"
        )
        self.refused(ValueError, "max_tokens: 0", KvantCache, config, max_tokens=0)
        self.refused(TypeError, "model.config|LlamaForCausalLM", KvantCache, self.model)

    def test_a_calibration_of_another_model(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "other.kvcal")
            calibrator = kvant.Calibrator("another model")
            for layer in range(2):
                for role in "kv":
                    calibrator.add_rows(layer, role, torch.randn(100, 2, 16))
            calibrator.finish().save(path)
            self.refused(
                ValueError, "2 layers, not 4", KvantCache, self.model.config, calibration=path
            )

    def test_too_many_tokens(self):
        cache = exact(self.model, max_tokens=64)
        self.refused(RuntimeError, "max_tokens", lambda: generate(self.model, cache=cache, new=60))

    def test_too_many_sequences(self):
        cache = exact(self.model, max_sequences=3)
        with torch.no_grad():
            self.model(self.tokens, past_key_values=cache)
            for copies in (lambda: copy.deepcopy(cache), lambda: cache.batch_repeat_interleave(2)):
                self.assertEqual(self.refused(kvant.Error, "max_sequences", copies).status, 60)
            self.refused(
                RuntimeError,
                "begin a new one",
                lambda: self.model(self.tokens[:, :1], past_key_values=cache),
            )

    def test_keys_of_an_earlier_state(self):
        cache = exact(self.model)
        layer, rows = cache.layers[0], torch.zeros(1, 2, 3, 16)
        old = layer.update(rows, rows)
        layer.update(rows, rows)
        module, q = self.model.model.layers[0].self_attn, torch.zeros(1, 4, 3, 16)
        self.refused(
            RuntimeError, "earlier state", kvant.transformers.attention, module, q, *old, None
        )
        self.assertEqual(old[0].sum(), 0)  # PyTorch reads the three tokens through it
        self.assertEqual((old[0] + 1).shape, (1, 2, 3, 16))


if __name__ == "__main__":
    unittest.main()
