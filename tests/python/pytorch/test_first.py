"""transform=first through KvantCache. Queries reach the cache before the keys of the same tokens,
without padding. Tokens equal the tokens of a cache that rounds nothing.
"""

import copy
import itertools
import unittest
from unittest import mock

import models
import torch
from common import TestCase
from test_transformers import FEW, MODES, generate

from kvant.cache import Cache
from kvant.transformers import KvantCache
from kvant.transformers.layer import KvantLayer

SPEC, PLAIN = "trellis-4:transform=first", "trellis-4:center=first,norm=first"
NEARLY_EXACT = "turboquant-8:transform=first,recent=1024"  # fp16 rows after the matrix
N = 700


def make(implementation, device="cpu", **shape):
    """A model whose channels of keys, and of queries, are correlated, as in trained models."""
    rope = {"rope_type": "default", "rope_theta": 1e12}  # RoPE hardly rotates most channels
    model = models.make("llama", implementation, rope_parameters=rope, **shape)
    generator = torch.Generator().manual_seed(7)
    dim = model.config.head_dim
    falling = torch.exp2(-6.4 / dim * torch.arange(dim))
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj"):
                mix = (
                    1.5
                    / dim**0.5
                    * torch.randn(dim, dim, generator=generator)
                    @ torch.diag(falling)
                )
                weight = getattr(layer.self_attn, name).weight
                weight.copy_((mix @ weight.view(-1, dim, weight.shape[1])).reshape(weight.shape))
    return model.to(device)


class Watched:
    """Records keys and queries of the first layer as the model makes them: [tokens, heads,
    head_dim] of the first sequence.
    """

    def __enter__(self):
        self.keys, self.queries, update, attend = [], [], KvantLayer.update, KvantLayer.attend

        def updated(layer, k, v, *others, **named):
            if layer.number == 0:
                self.keys.append(k[0].transpose(0, 1))
            return update(layer, k, v, *others, **named)

        def attended(layer, query, *others):
            if layer.number == 0:
                self.queries.append(query[0].transpose(0, 1))
            return attend(layer, query, *others)

        self.patches = (
            mock.patch.object(KvantLayer, "update", updated),
            mock.patch.object(KvantLayer, "attend", attended),
        )
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *error):
        for patch in self.patches:
            patch.stop()

    def error(self, cache, first, end):
        """Root mean square error of the scores of the stored keys with queries of other tokens."""
        k, q = torch.cat(self.keys), torch.cat(self.queries)
        wrong = cache.layers[0].decoded(len(k))[0][0].transpose(0, 1)[first:end] - k[first:end]
        asked = q[torch.arange(first, end) * 7 % len(q)].view(
            end - first, k.shape[1], -1, k.shape[2]
        )
        return float((asked * wrong[:, :, None]).sum(3).square().mean().sqrt())


def prefill(model, cache, tokens, parts=(0, N)):
    with torch.no_grad():
        for first, end in zip(parts, parts[1:]):
            model(tokens[:, first:end], past_key_values=cache)
    return cache


class Learns(TestCase):
    device, shape = "cpu", {}

    def setUp(self):
        self.tokens = models.prompt(N, batch=1, padding=0)[0].to(self.device)

    def make(self, implementation="kvant"):
        return make(implementation, self.device, **self.shape)

    def test_scores_err_less_than_with_factors(self):
        """The matrix helps from the first tokens after the fp16 rows on, in one call and in
        several.
        """
        model = self.make()
        for parts in ((0, N), (0, 100, 350, N)):
            found = []
            for spec in (SPEC, PLAIN):
                with Watched() as watched:
                    cache = prefill(
                        model, KvantCache(model.config, k=spec, v="f32"), self.tokens, parts
                    )
                    found.append(watched.error(cache, 64, N))
            self.assertLess(found[0], 0.8 * found[1], parts)

    def test_presets_learn(self):
        """A preset and its specs store the first 64 rows as fp16 after the matrix, so equal bits
        show that the matrices are equal. Rows 64 .. 255 are codes. Among later rows, the newest 64,
        the 256 of a write and the rest of their first blocks are fp16. Not all codes are equal,
        because the preset rounds rows to fp16 before it encodes them.
        """
        model, rows, errors = self.make(), [], []
        for stored in ({}, {"k": SPEC, "v": "trellis-4"}, {"k": PLAIN, "v": "trellis-4"}):
            with Watched() as watched:
                cache = KvantCache(model.config, **stored, max_tokens=2048)
                prefill(model, cache, self.tokens)
                rows.append(cache.layers[0].decoded(N)[0])
                errors.append(watched.error(cache, 64, 256))
        self.assertTrue(torch.equal(rows[0][:, :, :64], rows[1][:, :, :64]))
        self.assertFalse(torch.equal(rows[0][:, :, :64], rows[2][:, :, :64]))
        self.assertTrue((rows[0] == rows[1])[:, :, 64:256].all(3).any())
        self.assertLess(errors[0], 0.8 * errors[2])

    def test_other_implementations_give_no_queries(self):
        model = self.make("sdpa")
        rows = [
            prefill(model, KvantCache(model.config, k=spec), self.tokens).layers[0].decoded(N)[0]
            for spec in (SPEC, PLAIN)
        ]
        self.assertTrue(torch.equal(*rows))

    def test_queries_of_padding_are_left_out(self):
        """In every layer, the queries of a sequence are noted with the positions of their tokens.
        Queries of single tokens are not noted.
        """
        model = self.make()
        tokens, mask = (x.to(self.device) for x in models.prompt(200, padding=30))
        seen, note = [], Cache.note_queries

        def noted(cache, layer, q, positions):
            seen.append(
                (layer, len(q), cache.length(0, layer), int(positions[0]), int(positions[-1]))
            )
            note(cache, layer, q, positions)

        with mock.patch.object(Cache, "note_queries", noted), torch.no_grad():
            cache = KvantCache(model.config)
            model(tokens[:, :100], attention_mask=mask[:, :100], past_key_values=cache)
            model(tokens[:, 100:], attention_mask=mask, past_key_values=cache)
            model(
                tokens[:, :1],
                attention_mask=torch.nn.functional.pad(mask, (0, 1), value=1),
                past_key_values=cache,
            )
        first = [x for layer in range(4) for x in ((layer, 70, 0, 0, 69), (layer, 100, 70, 0, 99))]
        self.assertEqual(
            seen,
            first
            + [
                x
                for layer in range(4)
                for x in ((layer, 100, 70, 70, 169), (layer, 100, 70, 100, 199))
            ],
        )


class Tokens(TestCase):
    def test_every_mode(self):
        """Rows are fp16 after the learned matrix. Tokens equal the stock cache's until two tokens
        are equally probable to three digits; from there on they may differ. One prompt may have
        such tokens early, so there are two. With 4 bits few tokens are equal.
        """
        prompts = [(n, *models.prompt(n, padding=17)) for n in (97, 100)]
        for kind in ("llama", "gemma2", "mistral"):
            stock, ours = models.twins(kind, "eager", "kvant", **FEW)
            same, coarse = [], []
            for mode, (n, tokens, mask) in itertools.product(MODES, prompts):
                wanted = generate(stock, mode, tokens=tokens, mask=mask)[:, n:]
                specs = ((same, NEARLY_EXACT), (coarse, SPEC))
                for found, spec in specs if mode == "greedy" else specs[:1]:
                    cache = KvantCache(ours.config, k=spec, v="f32", exact=True)
                    got = generate(ours, mode, cache, tokens=tokens, mask=mask)[:, n:]
                    found.append(float((got == wanted).float().mean()))
            self.assertGreater(sum(same) / len(same), 0.9, kind)
            self.assertLess(sum(coarse) / len(coarse), 0.7, kind)

    def test_copies_and_rows_of_beams_are_the_same_cache(self):
        model = make("kvant")
        tokens = models.prompt(N, batch=1, padding=0)[0]
        cache = prefill(model, KvantCache(model.config, max_sequences=16), tokens)
        again = copy.deepcopy(cache)
        again.batch_repeat_interleave(3)
        again.reorder_cache(torch.tensor([2, 0, 0]))
        rows = cache.layers[0].decoded(N)[0]
        self.assertTrue(torch.equal(again.layers[0].decoded(N)[0], rows.expand(3, -1, -1, -1)))
        cache.crop(-60)
        self.assertTrue(torch.equal(cache.layers[0].decoded(640)[0], rows[:, :, :640]))


if __name__ == "__main__":
    unittest.main()
