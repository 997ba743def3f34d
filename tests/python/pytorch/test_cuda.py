"""KvantCache and torch.ops.kvant on a GPU, compared with the CPU: equal bytes of pages, logits
within the rounding of queries and weights to fp16, every generation mode, a CUDA graph.

Exits with 77, skipped, if there is no GPU or no libkvant_cuda. Models have a head_dim of 64, for
which every build of libkvant_cuda has kernels.
"""

import gc
import sys
import unittest

import models
import test_first
import torch
from common import TestCase
from torch.library import opcheck

import kvant
import kvant.torch
from kvant.transformers import KvantCache, graphs

try:
    if not torch.cuda.is_available():
        raise ImportError("PyTorch sees no GPU")
    kvant.Cache(1, 1, 1, 64, 64, device="cuda", k="trellis-4").close()
except (ImportError, kvant.Error) as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

from test_transformers import MODES, generate  # noqa: E402

SHAPE = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 256}


def pair(kind, *implementations):
    cpu, gpu = models.twins(kind, *(implementations or ("kvant", "kvant")), **SHAPE)
    return cpu, gpu.cuda()


def logits_of(model, cache, lengths, n=150):
    """Logits of a padded prompt that is given in parts; most of the last parts are single
    tokens.
    """
    tokens, mask = models.prompt(n, padding=70)
    found = []
    with torch.no_grad():
        for first, end in zip((0, *lengths), lengths):
            x, m = tokens[:, first:end].to(model.device), mask[:, :end].to(model.device)
            found.append(model(x, attention_mask=m, past_key_values=cache).logits.float().cpu())
    return torch.cat(found, 1)[:, 70:]


def errors(found, wanted):
    """The largest error of each token, relative to the largest logit."""
    return ((found - wanted).abs().amax((0, 2)) / wanted.abs().max()).sort().values


def amplified(kind):
    """How far the CPU's logits move with noise of 2^-13 in the weights, which is a quarter of a
    step of fp16.
    """
    model, found = models.make(kind, **SHAPE), []
    noise = torch.Generator().manual_seed(1)
    for _ in range(2):
        found.append(
            logits_of(model, KvantCache(model.config, k="int-8", v="int-8"), (100, 149, 150))
        )
        with torch.no_grad():
            for weights in model.parameters():
                weights *= 1 + 2**-13 * torch.randn(weights.shape, generator=noise)
    return errors(*found)


class Models(TestCase):
    """Random models amplify a code that differs on the GPU because a row lies at a border between
    codes. So the test compares most tokens, not all. Rows that are read wrongly cause errors of the
    size of logits, about 1.
    """

    KINDS = ("llama", "qwen2", "mistral", "gemma3_text", "gpt_oss")

    def test_logits_are_those_of_the_cpu(self):
        for kind in self.KINDS:
            found = []
            for model in pair(kind):
                cache = KvantCache(model.config, k="int-8", v="int-8")
                found.append(logits_of(model, cache, (100, 149, 150)))
                self.assertLess(cache.bytes, cache.f16_bytes)
            self.assertLess(errors(*found)[40], amplified(kind)[40], kind)

    def test_every_mode_gives_tokens_of_the_cpu(self):
        """Each token of greedy modes is the CPU's best token or as good: its logit is below the
        best logit by less than noise in the weights moves logits. Other modes only have to run.
        """
        for kind in self.KINDS:
            cpu, gpu = pair(kind)
            tokens, mask = models.prompt()
            bound = 2 * float(amplified(kind)[60])  # for a difference of two logits
            for mode in MODES:
                if mode in ("assisted", "sampling", "two samples"):
                    continue  # an assistant runs on the CPU, with other random numbers
                cache = KvantCache(gpu.config, k="int-8", v="int-8")
                found = generate(gpu, mode, cache, tokens=tokens.cuda(), mask=mask.cuda()).cpu()
                self.assertTrue(torch.equal(found[:, :40], tokens[-len(found) :]))
                if "beam" in mode:
                    continue
                seen = torch.cat([mask[-len(found) :], torch.ones_like(found[:, 40:])], 1)
                positions = (seen.cumsum(1) - 1).clamp(min=0)
                with torch.no_grad():
                    cache = KvantCache(cpu.config, k="int-8", v="int-8")
                    call = dict(attention_mask=seen, position_ids=positions, past_key_values=cache)
                    logits = cpu(found, **call).logits[:, 39:-1]
                below = logits.amax(2) - logits.gather(2, found[:, 40:, None])[:, :, 0]
                below = (below / logits.abs().max()).amax(0).sort().values  # for each token
                self.assertLess(below[len(below) * 3 // 4], bound, (kind, mode))

    def test_other_implementations_read_the_rows(self):
        for implementation in ("sdpa", "eager"):
            cpu, gpu = pair("llama", "kvant", implementation)
            found = [
                logits_of(
                    model, KvantCache(model.config, k="int-8", v="int-8"), (100, *range(140, 151))
                )
                for model in (cpu, gpu)
            ]
            self.assertLess(errors(*found)[40], amplified("llama")[40], implementation)

    def test_half_precision(self):
        model = models.make("llama", **SHAPE).cuda().to(torch.bfloat16)
        tokens, mask = (x.cuda() for x in models.prompt())
        self.assertEqual(
            generate(model, "beams", KvantCache(model.config), tokens=tokens, mask=mask).shape,
            (2, 64),
        )


class Learns(test_first.Learns):
    """Matrices of the first tokens and queries, as on the CPU."""

    device, shape = "cuda", SHAPE


class Graphs(TestCase):
    """Replayed graphs, compared with calls one by one."""

    def test_logits(self):
        lengths = (100, 149, *range(150, 261))
        for dtype, bound in ((torch.float32, 1e-3), (torch.bfloat16, 0.03)):
            for kind in Models.KINDS if dtype == torch.float32 else ("llama",):
                plain, replayed = (
                    model.cuda().to(dtype)
                    for model in models.twins(kind, "kvant", "kvant", **SHAPE)
                )
                graphs(replayed)
                found = [
                    logits_of(model, KvantCache(model.config, "balanced"), lengths, 260)
                    for model in (plain, replayed)
                ]
                first = errors(found[0][:, :110], found[1][:, :110])
                self.assertLess(first[60], bound, (kind, dtype))
                self.assertLess(errors(*found)[60], 0.1, (kind, dtype))
                calls = replayed.forward.graphs.calls
                self.assertTrue(all(call.calls > 20 for call in calls.values()))

    def test_generate(self):
        """Every mode runs. Tokens of greedy decoding equal the tokens without graphs until a block
        is full.
        """
        tokens, mask = (x.cuda() for x in models.prompt(90, padding=17))
        plain, replayed = (
            model.cuda() for model in models.twins("llama", "kvant", "kvant", **SHAPE)
        )
        graphs(replayed)
        for mode in MODES:
            if mode == "assisted":
                continue
            found = [
                generate(
                    m,
                    mode,
                    KvantCache(m.config, max_tokens=2048, max_sequences=16),
                    30,
                    tokens,
                    mask,
                )
                for m in (plain, replayed)
            ]
            same = (found[0] == found[1])[:, 90:].float().mean()
            self.assertGreater(same, 0.9 if mode == "greedy" else -1, mode)

    def test_memory_is_given_back(self):
        model = graphs(models.make("llama", **SHAPE).cuda())
        free = []
        for _ in range(4):
            logits_of(
                model,
                KvantCache(model.config, "balanced", max_tokens=1 << 20),
                (100, *range(101, 140)),
            )
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free.append(torch.cuda.mem_get_info()[0])
        self.assertLess(free[1] - free[3], 64 << 20)


class Operators(TestCase):
    def rows(self, n=200, seed=1):
        return torch.randn(n, 64, generator=torch.Generator().manual_seed(seed))

    def cache(self, n=70):
        """A layer of two sequences with n tokens each, and the arguments of every operator."""
        cache = kvant.Cache(1, 4, 2, 64, 4096, device="cuda", max_sequences=2, k="trellis-4")
        sequences = [cache.new_sequence() for _ in range(2)]
        number, lengths = kvant.torch.register(cache)
        k, v = (torch.randn(2, n, 2, 64, device="cuda") for _ in "kv")
        torch.ops.kvant.cache_append(lengths, k, v, number, 0, sequences)
        return cache, sequences, number, lengths

    def test_opcheck(self):
        for x in (self.rows().cuda(), self.rows(64).cuda().to(torch.bfloat16)):
            opcheck(torch.ops.kvant.encode, (x, "trellis-4", "k"))
            pages = torch.ops.kvant.encode(x, "trellis-4", "k")
            opcheck(torch.ops.kvant.decode, (pages, "trellis-4", "k", 64, len(x)))

    def test_opcheck_of_caches(self):
        cache, sequences, number, lengths = self.cache()
        k, q = torch.randn(2, 3, 2, 64, device="cuda"), torch.randn(2, 3, 4, 64, device="cuda")
        opcheck(torch.ops.kvant.cache_append, (lengths, k, k, number, 0, sequences))
        opcheck(torch.ops.kvant.cache_attend, (lengths, q, number, 0, sequences, 64))
        opcheck(
            torch.ops.kvant.cache_attend,
            (lengths, q.half(), number, 0, sequences, 64),
            {"window": 9},
        )
        cache.begin_steps(sequences)
        cache.next_step()
        opcheck(
            torch.ops.kvant.cache_step,
            (lengths, *(x[:, 0].contiguous() for x in (q, k, k)), number, 0),
        )

    def test_a_graph_replays_operators(self):
        def there_and_back(x):
            return torch.ops.kvant.decode(
                torch.ops.kvant.encode(x, "turboquant-4", "k"), "turboquant-4", "k", 64, 200
            )

        x = self.rows().cuda()
        there_and_back(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = there_and_back(x)
        for seed in (2, 3):
            x.copy_(self.rows(seed=seed))
            graph.replay()
            self.assertTrue(torch.equal(found, there_and_back(x)))
        compiled = torch.compile(there_and_back, fullgraph=True, mode="reduce-overhead")
        for seed in (4, 5, 6):
            x = self.rows(seed=seed).cuda()
            self.assertTrue(torch.equal(compiled(x), there_and_back(x)))

    def test_a_compiled_step_appends_before_it_attends(self):
        _, sequences, number, lengths = self.cache()

        def step(k, v, q):
            torch.ops.kvant.cache_append(lengths, k, v, number, 0, sequences)
            return torch.ops.kvant.cache_attend(lengths, q, number, 0, sequences, 64) * 2

        k, v, q = (torch.randn(2, 1, heads, 64, device="cuda") for heads in (2, 2, 4))
        before = torch.ops.kvant.cache_attend(lengths, q, number, 0, sequences, 64)
        got = torch.compile(step, fullgraph=True, backend="aot_eager")(k, v, q)
        self.assertEqual(lengths.tolist(), [71])
        self.assertTrue(
            torch.equal(got, torch.ops.kvant.cache_attend(lengths, q, number, 0, sequences, 64) * 2)
        )
        self.assertFalse(torch.equal(got, before * 2))

    def test_pages_are_those_of_the_cpu(self):
        rows = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
        for spec in ("int-4", "turboquant-4", "trellis-4"):
            for role in "kv":
                for dtype in (torch.float32, torch.bfloat16):
                    x = rows.to(dtype)
                    pages = torch.ops.kvant.encode(x, spec, role)
                    self.assertTrue(
                        torch.equal(torch.ops.kvant.encode(x.cuda(), spec, role).cpu(), pages),
                        (spec, role),
                    )
                    back = [
                        torch.ops.kvant.decode(p, spec, role, 64, 150).cpu()
                        for p in (pages, pages.cuda())
                    ]
                    self.assertTrue(torch.allclose(*back, rtol=0, atol=1e-5))


if __name__ == "__main__":
    unittest.main()
