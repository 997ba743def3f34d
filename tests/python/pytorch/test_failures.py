"""KvantCache after a call that failed half-way: later calls are refused or right. The stock cache
would go on with layers that lack tokens.
"""

import contextlib
import copy
import unittest

import models
import torch
from common import TestCase
from test_transformers import exact

import kvant
from kvant.transformers.steps import Steps


@contextlib.contextmanager
def broken(layer):
    """The model's layer raises ArithmeticError."""

    def fail(*_):
        raise ArithmeticError

    hook = layer.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def logits(model, cache, tokens, mask=None):
    return model(tokens, attention_mask=mask, past_key_values=cache).logits


def lengths(cache):
    return [layer.get_seq_length() for layer in cache.layers]


class Failures(TestCase):
    def close(self, got, wanted):
        self.assertTrue(torch.allclose(got, wanted, rtol=0, atol=1e-4 * wanted.abs().max()))

    def test_a_pass_that_ends_in_some_layer(self):
        tokens = models.prompt(60, batch=1, padding=0)[0]
        for kind in ("llama", "gemma2"):
            stock, ours = models.twins(kind, "eager", "kvant")
            wanted = logits(stock, None, tokens)
            for number, layer in enumerate(ours.model.layers):
                cache = exact(ours)
                logits(ours, cache, tokens[:, :40])
                with self.subTest(kind=kind, layer=number), self.assertRaises(ArithmeticError):
                    with broken(layer):
                        logits(ours, cache, tokens[:, 40:50])
                if number:
                    other = copy.deepcopy(cache)
                    for one in (cache, other):
                        words = "40 of 50|crop"
                        self.refused(RuntimeError, words, logits, ours, one, tokens[:, 40:])
                    self.refused(RuntimeError, "with 40 tokens|remove more", cache.crop, -9)
                    self.assertEqual(max(lengths(cache)), 50)
                    cache.crop(-10)
                self.assertEqual(lengths(cache), [40] * 4)
                self.close(logits(ours, cache, tokens[:, 40:]), wanted[:, 40:])

    def test_a_first_pass_that_ends_in_some_layer(self):
        stock, ours = models.twins("llama", "eager", "kvant")
        tokens = models.prompt(60, batch=1, padding=0)[0]
        for n in (20, 40):  # the next call adds as many tokens, or another number
            cache = exact(ours)
            with self.assertRaises(ArithmeticError), broken(ours.model.layers[2]):
                logits(ours, cache, tokens[:, :20])
            self.refused(
                RuntimeError, f"0 of {20 + n}|crop", logits, ours, cache, tokens[:, 20 : 20 + n]
            )
            cache.crop(-20 - n)
            self.close(logits(ours, cache, tokens), logits(stock, None, tokens))

    def test_a_row_that_is_refused_next_to_padding(self):
        """Rows with padding are appended one by one, so some are there when the error comes."""
        stock, ours = models.twins("llama", "eager", "kvant")
        tokens, mask = models.prompt()
        cache, weights = exact(ours), ours.model.embed_tokens.weight
        spoiled = tokens.clone()
        spoiled[1, 20] = 299
        kept = weights[299].clone()
        with torch.no_grad():
            weights[299] = torch.nan
            self.refused(kvant.Error, "NaN", logits, ours, cache, spoiled, mask)
            weights[299] = kept
        self.close(
            logits(ours, cache, tokens, mask)[:, -1], logits(stock, None, tokens, mask)[:, -1]
        )

    def test_sequences_that_found_no_room_are_freed(self):
        ours = models.make("llama")
        cache = exact(ours, max_sequences=4)
        for _ in range(3):
            logits(ours, cache, models.prompt(batch=3, padding=0)[0])
            self.refused(kvant.Error, "max_sequences", cache.batch_repeat_interleave, 2)
            cache.reset()

    def test_reset_needs_no_room(self):
        """A full cache has no room for the rows of steps, which reset forgets with all others."""
        ours = models.make("llama")
        cache = exact(ours, max_tokens=64)
        logits(ours, cache, models.prompt(64, batch=1, padding=0)[0])
        for store in cache._stores.values():
            store.steps = Steps()
            store.steps.left, store.steps.taken = 2, 1
            store.steps.rows = {
                layer: tuple(torch.zeros(1, 64, *x.shape[1::2]) for x in cache.layers[layer].like)
                for layer in store.lengths
            }
        self.refused(RuntimeError, "max_tokens", cache.crop, -1)
        for store in cache._stores.values():
            store.steps.left, store.steps.taken = 2, 1
        cache.reset()
        self.assertEqual(lengths(cache), [0] * 4)
        logits(ours, cache, models.prompt(64, batch=1, padding=0)[0])

    def test_crop_of_dropped_tokens(self):
        """Layers are equally long after a refusal, whichever comes first."""
        tokens = models.prompt(700, batch=1, padding=0)[0]
        window = models.WINDOW
        for kinds in ("sliding_attention", "full_attention"), ("full_attention",):
            options = {"layer_types": [*kinds, "sliding_attention", "full_attention"][-4:]}
            options["num_hidden_layers"] = len(options["layer_types"])
            stock, ours = models.twins("gemma2", "eager", "kvant", **options)
            cache = exact(ours)
            logits(ours, cache, tokens)
            logits(ours, cache, tokens[:, :1])
            for n in (500, 701 - window, 700):
                self.refused(RuntimeError, "can remove at most", cache.crop, -n)
                self.assertEqual(set(lengths(cache)), {701})
            cache.crop(-200)
            self.close(logits(ours, cache, tokens[:, 501:]), logits(stock, None, tokens)[:, 501:])
            cache.crop(-700)
            self.assertEqual((set(lengths(cache)), cache.bytes), ({0}, 0))
            self.close(logits(ours, cache, tokens), logits(stock, None, tokens))

    def test_crop_before_the_past_was_recorded(self):
        ours, tokens = models.make("mistral"), models.prompt(700, batch=1, padding=0)[0]
        cache = exact(ours)
        logits(ours, cache, tokens)
        logits(ours, cache, tokens[:, :1])
        cache.activate_past_recording()
        logits(ours, cache, tokens[:, :100])
        self.refused(RuntimeError, "can remove at most", cache.crop, -500)
        cache.crop(-200)


if __name__ == "__main__":
    unittest.main()
