"""The RoPE that KvantCache reads from configs, compared with the models' own: their buffers, and
the keys of every layer for the same tokens at other positions.
"""

import unittest

import models  # noqa: F401  puts the package on the path
import torch
from common import TestCase
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvant.transformers import rope

N, BY, HEAD_DIM = 12, 7, 16
SHAPE = dict(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=HEAD_DIM,
    vocab_size=50,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0)
PARTIAL = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25)


def config_of(kind, **options):
    return AutoConfig.for_model(kind, **SHAPE | options)


def keys_of(model, first):
    """Keys of every layer, [1, kv heads, tokens, head_dim], for tokens at positions from `first`
    on.
    """
    cache = DynamicCache(config=model.config)
    mask = torch.zeros(1, 1, N, N).masked_fill(torch.ones(N, N).triu(1).bool(), -1e9)
    with torch.no_grad():
        model(
            torch.arange(N)[None],
            past_key_values=cache,
            position_ids=torch.arange(N)[None] + first,
            attention_mask=mask,
        )
    return [layer.keys for layer in cache.layers]


def turned(keys, found, by):
    angles, n, out = by * torch.tensor(found.frequencies), len(found.frequencies), keys.clone()
    x, y = keys[..., :n], keys[..., n : 2 * n]
    out[..., :n] = x * angles.cos() - y * angles.sin()
    out[..., n : 2 * n] = y * angles.cos() + x * angles.sin()
    return out


class OfModels(TestCase):
    def check(self, kind, **options):
        """Scores depend only on distances, so all layers see the same hidden states wherever a text
        begins. The bound is for sums of 64 products of binary32 numbers, some layers deep.
        """
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config_of(kind, **options), attn_implementation="eager"
        ).eval()
        for layer, (keys, later) in enumerate(zip(keys_of(model, 0), keys_of(model, BY))):
            found = rope.rope_of(model.config, layer, keys.shape[3], 512)
            difference = (turned(keys, found, BY) - later).abs().max() / keys.abs().max()
            self.assertLess(float(difference), 1e-5, (kind, layer))

    def test_keys_at_other_positions(self):
        for kind in sorted(rope._MODELS - {"phi"}):
            with self.subTest(kind=kind):
                self.check(kind)

    def test_scaled_and_partial(self):
        self.check("llama", rope_parameters=LLAMA3 | {"original_max_position_embeddings": 128})
        self.check("qwen3", rope_parameters=YARN | {"original_max_position_embeddings": 128})
        self.check(
            "llama", rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=8.0)
        )
        self.check("stablelm", rope_parameters=PARTIAL)
        self.check(
            "phi", head_dim=HEAD_DIM, rope_parameters=PARTIAL | {"partial_rotary_factor": 0.5}
        )


class OfConfigs(TestCase):
    def same(self, found, buffer):
        self.assert_close(torch.tensor(found.frequencies), buffer, 1e-6)

    def assert_close(self, a, b, bound):
        self.assertEqual(a.shape, b.shape)
        self.assertLess(float(((a - b) / b).abs().max()), bound)

    def test_buffers(self):
        smollm2 = config_of(
            "llama", rope_parameters={"rope_type": "default", "rope_theta": 100000.0}
        )
        llama3 = config_of(
            "llama",
            rope_parameters=LLAMA3 | {"original_max_position_embeddings": 8192},
            max_position_embeddings=131072,
        )
        for config in smollm2, llama3:
            model = AutoModelForCausalLM.from_config(config)
            self.same(rope.rope_of(config, 3, HEAD_DIM, 512), model.model.rotary_emb.inv_freq)

    def test_layers_of_two_kinds(self):
        config = config_of("gemma3_text", sliding_window=8)
        buffers = AutoModelForCausalLM.from_config(config).model.rotary_emb
        found = [rope.rope_of(config, layer, HEAD_DIM, 512) for layer in range(6)]
        self.assertEqual(config.layer_types[4:], ["sliding_attention", "full_attention"])
        self.same(found[4], buffers.sliding_attention_inv_freq)
        self.same(found[5], buffers.full_attention_inv_freq)
        self.assertGreater(found[4].frequencies[-1], 10 * found[5].frequencies[-1])

    def test_none(self):
        dynamic = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
        long = dict(
            rope_type="longrope",
            rope_theta=10000.0,
            short_factor=[1.0] * 8,
            long_factor=[4.0] * 8,
            factor=4.0,
        )
        for config in (
            config_of("llama", rope_parameters=dynamic),
            config_of("phi3", rope_parameters=long | {"original_max_position_embeddings": 128}),
            config_of("smollm3"),  # not in every layer
            config_of("cohere"),  # other pairs of channels
        ):
            self.assertIsNone(rope.rope_of(config, 0, HEAD_DIM, 512))


if __name__ == "__main__":
    unittest.main()
