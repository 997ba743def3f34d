"""KvantCache and torch.ops.kvant on a GPU, beside the same on the CPU: equal bytes of pages, logits within
the rounding of queries and weights to fp16, every generation mode, a CUDA graph.

Exits with 77, skipped, where a GPU or libkvant_cuda is missing. Models have a head_dim of 64, for which every
build of libkvant_cuda has kernels."""

import sys
import unittest

import models
import torch
from common import TestCase

import kvant
from kvant.transformers import KvantCache

try:
    if not torch.cuda.is_available():
        raise ImportError("PyTorch sees no GPU")
    kvant.Cache(1, 1, 1, 64, 64, device="cuda", k="trellis-4").close()
except (ImportError, kvant.Error) as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

from test_transformers import MODES, generate  # noqa: E402

SHAPE = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 256}


def pair(kind):
    cpu, gpu = models.twins(kind, "kvant", "kvant", **SHAPE)
    return cpu, gpu.cuda()


class Models(TestCase):
    KINDS = ("llama", "qwen2", "mistral", "gemma3_text", "gpt_oss")

    def test_logits_are_those_of_the_cpu(self):
        """Of a padded batch, a second chunk and a token. Layers amplify attention's errors, of about
        2^-11 of the largest number: a bound of 2 % of the largest logit; pages that were read
        wrongly give errors of its size."""
        for kind in self.KINDS:
            tokens, mask = models.prompt(150, padding=70)
            found = []
            with torch.no_grad():
                for model in pair(kind):
                    cache, logits = KvantCache(model.config, "balanced"), []
                    for part in (slice(0, 100), slice(100, 149), slice(149, 150)):
                        x, m = tokens[:, part].to(model.device), mask[:, : part.stop].to(model.device)
                        logits.append(model(x, attention_mask=m, past_key_values=cache).logits.cpu())
                    found.append(torch.cat(logits, 1)[:, 70:])
                    self.assertLess(cache.bytes, cache.f16_bytes)
            error = (found[0] - found[1]).abs().max() / found[0].abs().max()
            self.assertLess(error, 0.02, kind)

    def test_every_mode_runs(self):
        """With 8 bits the stock cache's tokens, except where two are as probable as each other."""
        for kind in self.KINDS:
            model = models.make(kind, **SHAPE).cuda()
            tokens, mask = (x.cuda() for x in models.prompt())
            for mode in MODES:
                with self.subTest(kind=kind, mode=mode):
                    if mode == "assisted":
                        continue  # its assistant is another model, on the CPU
                    cache = KvantCache(model.config, k="int-8", v="int-8")
                    ids = generate(model, mode, cache, tokens=tokens, mask=mask)
                    stock = generate(model, mode, tokens=tokens, mask=mask)
                    self.assertGreater((ids == stock).float().mean(), 0.9)

    def test_half_precision(self):
        model = models.make("llama", **SHAPE).cuda().to(torch.bfloat16)
        tokens, mask = (x.cuda() for x in models.prompt())
        self.assertEqual(generate(model, "beams", KvantCache(model.config), tokens=tokens, mask=mask).shape, (2, 64))

    def test_rows_are_not_read_back(self):
        model = models.make("llama", "sdpa", **SHAPE).cuda()
        with torch.no_grad():
            call = lambda: model(models.prompt()[0].cuda(), past_key_values=KvantCache(model.config))  # noqa: E731
            self.refused(NotImplementedError, "attn_implementation", call)


class Operators(TestCase):
    def test_pages_are_those_of_the_cpu(self):
        rows = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
        for spec in ("int-4", "turboquant-4", "trellis-4"):
            for role in "kv":
                for dtype in (torch.float32, torch.bfloat16):
                    x = rows.to(dtype)
                    pages = torch.ops.kvant.encode(x, spec, role)
                    self.assertTrue(
                        torch.equal(torch.ops.kvant.encode(x.cuda(), spec, role).cpu(), pages), (spec, role)
                    )
                    back = [torch.ops.kvant.decode(p, spec, role, 64, 150).cpu() for p in (pages, pages.cuda())]
                    self.assertTrue(torch.allclose(*back, rtol=0, atol=1e-5))


if __name__ == "__main__":
    unittest.main()
