"""kvant.transformers.graphs on the mock of a GPU (tests/cuda/host), whose memory is the computer's.
The mock calls the function again that a graph would replay. KVANT_CUDA_LIBRARY names the mock.
"""

import contextlib
import copy
import functools
import sys
import unittest
import warnings
from unittest import mock

import models
import test_first
import torch
from common import TestCase
from test_transformers import FEW, generate
from torch.library import opcheck

import kvant
import kvant.torch
from kvant.transformers import KvantCache, graphs
from kvant.transformers.steps import Steps

SHAPE = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 256}
MODULE = sys.modules["kvant.transformers.graphs"]  # the package has a function of this name
replays = []


def capture(function):
    made = function()

    def replay():
        replays.append(1)
        for name, x in function().items():
            if torch.is_tensor(x):
                made[name].copy_(x)

    return replay, made


def on_host(value, what):
    return kvant.places.read_dlpack(value.__dlpack__())


def mock_device():
    """Lets tensors of the CPU pass as tensors of a GPU."""
    stack = contextlib.ExitStack()
    for patched in (
        mock.patch.object(KvantCache, "_on_gpu", staticmethod(lambda rows: True)),
        mock.patch.object(kvant.places.Gpu, "_describe", staticmethod(on_host)),
        mock.patch.object(torch.cuda, "mem_get_info", lambda *device: (1 << 30, 1 << 30)),
        mock.patch.object(MODULE, "capture", capture),
    ):
        stack.enter_context(patched)
    replays.clear()
    return stack


class Learns(test_first.Learns):
    """Learning in a GPU's cache, with the library's code for it."""

    shape = SHAPE

    def run(self, result=None):
        with mock_device():
            return super().run(result)


class Graphs(TestCase):
    """Trellis codecs, whose rows are fp16 until a block is full, with and without graphs."""

    KINDS = ("llama", "qwen2", "mistral", "gemma3_text", "gpt_oss")

    def both(self, kind, use, **cache):
        found = []
        for wrap in (lambda model: model, graphs):
            model = wrap(models.make(kind, **SHAPE, **FEW))
            with mock_device():
                found.append(
                    use(model, KvantCache(model.config, max_tokens=4096, max_sequences=16, **cache))
                )
        return found

    def test_logits_are_those_of_calls_one_by_one(self):
        """The same tokens with and without graphs. Rows of the block that a step fills are fp16 in
        the step, and codes without graphs. A model with random weights amplifies that difference,
        and later tokens see it.
        """
        tokens, mask = models.prompt(230, padding=17)

        def use(model, cache):
            with torch.no_grad():
                found = [
                    model(
                        tokens[:, :90], attention_mask=mask[:, :90], past_key_values=cache
                    ).logits[:, -1:]
                ]
                for n in range(91, 231):
                    seen = mask[:, :n]
                    positions = seen.sum(1, keepdim=True) - 1
                    call = dict(attention_mask=seen, position_ids=positions, past_key_values=cache)
                    found.append(model(tokens[:, n - 1 : n], **call).logits)
            return torch.cat(found, 1)

        for kind in self.KINDS:
            with self.subTest(kind=kind):
                plain, replayed = self.both(kind, use, preset="balanced")
                self.assertGreater(len(replays), 130)
                errors = (plain - replayed).abs().amax((0, 2)) / plain.abs().max()
                self.assertLess(errors[:38].max(), 1e-3)
                self.assertLess(errors.median(), 0.05)

    def test_a_cache_is_as_without_graphs(self):
        """Also for more tokens, and in copies. No block is filled, for the reason above."""
        tokens = models.prompt(66, padding=0)[0]

        def use(model, cache):
            first = generate(model, "greedy", cache, 25, tokens, torch.ones_like(tokens))
            longer = torch.cat([first, tokens[:, :9]], 1)
            found = generate(model, "sampling", cache, 25, longer, torch.ones_like(longer)).tolist()
            again = copy.deepcopy(cache)
            return (
                found,
                cache.get_seq_length(),
                again.get_seq_length(),
                cache.bytes,
                again.f16_bytes,
            )

        plain, replayed = self.both("llama", use, k="trellis-4", v="trellis-4")
        self.assertEqual(replayed, plain)

    def test_modes_without_replays(self):
        """Beams change the cache after every token, and drafts have several tokens. The codec is
        fp16, because other codecs store rows as codes in a block that beams share, but as fp16 in a
        step.
        """
        for seed in (1, 2, 3):
            tokens, mask = models.prompt(90, padding=17, seed=seed)
            for mode in ("beams", "prompt lookup"):
                use = lambda model, cache, mode=mode: generate(
                    model, mode, cache, 30, tokens, mask
                ).tolist()  # noqa: E731
                plain, replayed = self.both("llama", use, k="f16", v="f16")
                self.assertEqual(replayed, plain, mode)

    def test_rows_of_steps_are_read_by_others(self):
        tokens = models.prompt(100, batch=1, padding=0)[0]

        def use(model, cache):
            first = generate(model, "greedy", cache, 30, tokens, torch.ones_like(tokens))
            model.set_attn_implementation("sdpa")
            longer = torch.cat([first, tokens[:, :9]], 1)
            with torch.no_grad():
                return model(longer[:, cache.get_seq_length() :], past_key_values=cache).logits

        plain, replayed = self.both("llama", use, k="int-8", v="int-8")
        self.assertTrue(torch.allclose(plain, replayed, rtol=0, atol=0.1 * plain.abs().max()))

    def test_to_the_last_token_of_the_cache(self):
        tokens = models.prompt(90, batch=1, padding=0)[0]
        seen, model = torch.ones_like(tokens), graphs(models.make("llama", **SHAPE))
        with mock_device():
            for most in (109, 108):
                cache = KvantCache(model.config, max_tokens=most, k="int-8", v="int-8")
                call = functools.partial(generate, model, "greedy", cache, 20, tokens, seen)
                if most == 109:  # the last new token is not stored
                    self.assertEqual((call().shape[1], cache.get_seq_length()), (110, 109))
                    self.assertGreater(len(replays), 10)
                else:
                    self.refused(RuntimeError, "give KvantCache max_tokens", call)

    def test_a_model_that_cannot_be_captured(self):
        tokens, mask = models.prompt(90)

        def use(model, cache):
            return generate(model, "greedy", cache, 20, tokens, mask)

        def fail(function):
            function()  # half of the work may be enqueued before an operator refuses
            raise RuntimeError("no operator for capturing")

        plain = self.both("llama", use, k="int-8", v="int-8")[0]
        model = graphs(models.make("llama", **SHAPE, **FEW))
        with (
            mock_device(),
            mock.patch.object(MODULE, "capture", fail),
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always")
            found = use(
                model,
                KvantCache(model.config, max_tokens=4096, max_sequences=16, k="int-8", v="int-8"),
            )
        self.assertIn(
            "no operator for capturing", " ".join(str(warning.message) for warning in said)
        )
        self.assertTrue(torch.equal(found, plain))
        self.assertTrue(model.forward.graphs.unable)

    def test_a_step_that_cannot_begin(self):
        """If the layers with a window cannot begin a step, the other layers do not take it
        either.
        """
        tokens = models.prompt(90, batch=1, padding=0)[0]

        def use(model, cache, fails):
            begin, found = Steps.next, []

            def fail(one, store):
                if fails and store is list(cache._stores.values())[-1] and one.taken == 2:
                    fails.pop()
                    raise ArithmeticError
                begin(one, store)

            with torch.no_grad(), mock.patch.object(Steps, "next", fail):
                model(tokens[:, :80], past_key_values=cache)
                while len(found) < 6:
                    at = 80 + len(found)
                    with contextlib.suppress(ArithmeticError):
                        found.append(model(tokens[:, at : at + 1], past_key_values=cache).logits)
            self.assertEqual(fails, [])
            self.assertEqual({layer.get_seq_length() for layer in cache.layers}, {86})
            return torch.cat(found)

        found = []
        for fails in [], [1]:
            model = graphs(models.make("gemma3_text", **SHAPE))
            with mock_device():
                cache = KvantCache(model.config, max_tokens=4096, k="f16", v="f16")
                found.append(use(model, cache, fails))
                self.assertEqual(len(cache._stores), 2)
        # Both have the same rows in fp16. Sums of another order err by less than fp16's rounding.
        self.assertLess((found[0] - found[1]).abs().max(), 2**-11 * found[0].abs().max())

    def test_a_mask_that_changes_is_an_error(self):
        tokens = models.prompt(90, padding=0)[0]
        model = graphs(models.make("llama", **SHAPE))
        with mock_device(), torch.no_grad():
            cache = KvantCache(model.config, max_tokens=2048)
            model(tokens, past_key_values=cache)
            for i in range(4):
                mask = torch.ones(2, 91 + i)
                mask[0, 5] = i != 2
                model(tokens[:, :1], attention_mask=mask, past_key_values=cache)
            self.refused(RuntimeError, "attention_mask", lambda: cache.bytes)


class Operators(TestCase):
    def test_opcheck_of_a_step(self):
        with mock_device():
            cache = kvant.Cache(1, 4, 2, 64, 4096, device="cuda", max_sequences=2, k="trellis-4")
            sequences = [cache.new_sequence() for _ in range(2)]
            number, lengths = kvant.torch.register(cache)
            k, q = torch.randn(2, 70, 2, 64), torch.randn(2, 4, 64)
            torch.ops.kvant.cache_append(lengths, k, k, number, 0, sequences)
            cache.begin_steps(sequences)
            cache.next_step()
            opcheck(
                torch.ops.kvant.cache_step,
                (lengths, q, k[:, 0].contiguous(), k[:, 1].contiguous(), number, 0),
            )
            self.refused(
                ValueError,
                "q: |2, 4, 64",
                torch.ops.kvant.cache_step,
                lengths,
                q[:1],
                k[:1, 0],
                k[:1, 0],
                number,
                0,
            )


if __name__ == "__main__":
    unittest.main()
