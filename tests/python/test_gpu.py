"""kvant.Cache and kvant.PagedCache on a GPU with PyTorch's tensors: the right addresses, strides
and streams arrive. This test compares numbers that must be equal; tests/cuda bounds the errors of
attention.

Exits with 77, skipped, if there is no PyTorch, GPU or libkvant_cuda.
"""

import sys
import unittest

from common import TestCase, normal, np

import kvant

try:
    import torch

    kvant.Cache(1, 1, 1, 64, 64, device="cuda", k="turboquant-4", v="int-4").close()
except (ImportError, kvant.Error) as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

LAYERS, HEADS, KV_HEADS, DIM, TOKENS = 2, 8, 2, 64, 150
SPECS = {"k": "turboquant-4", "v": "int-4"}
K = normal(1, TOKENS, KV_HEADS, DIM)
V = normal(2, TOKENS, KV_HEADS, DIM)
Q = normal(3, 5, HEADS, DIM)


def on_gpu(array):
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()


def decoded(rows, role):
    codec = kvant.Codec(SPECS[role], DIM, role)
    return np.stack(
        [codec.decode(codec.encode(rows[:, head]), len(rows)) for head in range(KV_HEADS)], 1
    )


class Cache(TestCase):
    def setUp(self):
        self.cache = kvant.Cache(
            LAYERS, HEADS, KV_HEADS, DIM, 512, device="cuda", **SPECS, max_sequences=3
        )
        self.sequence = self.cache.new_sequence()
        for layer in range(LAYERS):
            self.cache.append(layer, self.sequence, on_gpu(K), on_gpu(V))

    def attend(self, q, sequence=None, **options):
        out = self.cache.attend(1, self.sequence if sequence is None else sequence, q, **options)
        torch.cuda.synchronize()
        return out

    def test_blocks_have_the_bytes_of_the_cpu(self):
        host = kvant.Cache(LAYERS, HEADS, KV_HEADS, DIM, 512, **SPECS, max_sequences=2)
        sequence, copy = host.new_sequence(), host.new_sequence()
        for layer in range(LAYERS):
            host.append(layer, sequence, K, V)
        for index in range(3):
            host.import_blocks(copy, self.cache.export_blocks(self.sequence, index))
        self.assertEqual(host.length(copy), TOKENS)
        for layer in range(LAYERS):
            self.assertTrue(
                np.array_equal(host.attend(layer, copy, Q), host.attend(layer, sequence, Q))
            )

    def test_a_query_that_sees_one_token_gives_its_value(self):
        """The token's weight is 1. The weight times the value's scale is rounded to fp16: 2^-11 of
        at most 15 steps, and less than 16 with the scale's own rounding. Sums in fp32 err by 2^-22
        of codes and zero point a step (docs/internals/cuda.md), in fewer than 64 steps.
        """
        values = decoded(V, "v")[-5:]
        out = (
            self.attend(on_gpu(Q), window=1)
            .cpu()
            .numpy()
            .reshape(5, KV_HEADS, HEADS // KV_HEADS, DIM)
        )
        codes = 16 / 15 * (V[-5:].max(2) - V[-5:].min(2))
        bound = 2.0**-11 * codes + 64 * 2.0**-22 * (codes + np.abs(V[-5:]).max(2))
        self.assertTrue((np.abs(out - values[:, :, None]).max((2, 3)) <= bound).all())

    def test_views_and_given_outputs(self):
        wanted = self.attend(on_gpu(Q))
        wide = torch.zeros(5, 3, HEADS, DIM, device="cuda")
        wide[:, 1] = on_gpu(Q)
        out, lse = torch.zeros(5, HEADS, DIM, device="cuda"), torch.zeros(5, HEADS, device="cuda")
        self.assertIs(self.attend(wide[:, 1], out=out, lse=lse), out)
        self.assertTrue(torch.equal(out, wanted))
        self.assertTrue(bool((lse != 0).all()))
        hidden = torch.zeros(5, TOKENS, device="cuda", dtype=torch.float16)
        self.assertTrue(torch.equal(self.attend(on_gpu(Q), mask=hidden), wanted))
        hidden[:, :100] = float("-inf")
        self.assertFalse(torch.equal(self.attend(on_gpu(Q), mask=hidden), wanted))

    def test_forks(self):
        wanted, fork = self.attend(on_gpu(Q)), self.cache.fork(self.sequence)
        for layer in range(LAYERS):
            self.cache.append(layer, fork, on_gpu(K[:3]), on_gpu(V[:3]))
        self.assertTrue(torch.equal(self.attend(on_gpu(Q)), wanted))
        self.cache.truncate(fork, TOKENS)
        self.assertTrue(torch.equal(self.attend(on_gpu(Q), fork), wanted))

    def test_work_of_another_stream_comes_first(self):
        """DLPack lets the default stream wait for the stream that still writes the rows."""
        wanted, other = self.attend(on_gpu(Q)), self.cache.new_sequence()
        k, v, stream = on_gpu(K), on_gpu(V), torch.cuda.Stream()
        late_k, late_v = torch.zeros_like(k), torch.zeros_like(v)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            late_k.copy_(k)
            late_v.copy_(v)
            for layer in range(LAYERS):
                self.cache.append(layer, other, late_k, late_v)
        self.assertTrue(torch.equal(self.attend(on_gpu(Q), other), wanted))

    def test_a_stream_of_its_own(self):
        stream = torch.cuda.Stream()
        cache = kvant.Cache(
            1, HEADS, KV_HEADS, DIM, 512, device="cuda", **SPECS, stream=stream.cuda_stream
        )
        cache.append(0, cache.new_sequence(), on_gpu(K), on_gpu(V))
        out = cache.attend(0, 0, on_gpu(Q))
        stream.synchronize()
        self.assertTrue(torch.equal(out, self.attend(on_gpu(Q))))

    def test_refusals(self):
        self.refused(
            ValueError,
            "k: |GPU",
            self.cache.append,
            0,
            self.sequence,
            torch.from_numpy(K),
            on_gpu(V),
        )
        self.refused(
            TypeError, "q: |bfloat16", self.cache.attend, 0, self.sequence, on_gpu(Q).bfloat16()
        )
        bad = on_gpu(K)
        bad[3, 1, 5] = float("nan")
        error = self.refused(
            kvant.Error, "layer 0", self.cache.append, 0, self.sequence, bad, on_gpu(V)
        )
        self.assertEqual((error.status, self.cache.length(self.sequence, 0)), (50, TOKENS))


class Paged(TestCase):
    def test_rows_and_attention(self):
        """Decoded rows equal the CPU's bit for bit. Attention equals attention of a cache with the
        same tokens, except for the way in which the context is split. Each time weights are rounded
        to fp16, by 2^-11 of themselves and of scales.
        """
        paged = kvant.PagedCache(*SPECS.values(), KV_HEADS, DIM, n_blocks=5, check_numbers=True)
        table = torch.tensor([[4, 0, 2]], dtype=torch.int32, device="cuda")
        tokens = torch.arange(TOKENS, device="cuda")
        slots = 64 * table[0].long()[tokens // 64] + tokens % 64
        paged.append(on_gpu(K), on_gpu(V), slots)
        for role, rows in (("k", K), ("v", V)):
            got = paged.decode(role, table[0], dtype=torch.float32).cpu().numpy()[:TOKENS]
            self.assertTrue(np.array_equal(got, decoded(rows, role)))
        cache = kvant.Cache(1, HEADS, KV_HEADS, DIM, 512, device="cuda", **SPECS)
        cache.append(0, cache.new_sequence(), on_gpu(K), on_gpu(V))
        lengths = torch.tensor([TOKENS], dtype=torch.int32, device="cuda")
        wanted = cache.attend(0, 0, on_gpu(Q))
        got = paged.attention(on_gpu(Q)[None], table, lengths)[0]
        difference = (got - wanted).abs().max().item()
        self.assertLessEqual(difference, 2.0**-9 * np.abs(V).max())

    def test_keys_are_learnt(self):
        """Scores err less than with center=first and norm=first from the same rows. Attention
        equals attention over the decoded rows, where fp16 rounds queries and weights by 2^-11 each.
        """
        from test_learning import text

        k, v, q = (on_gpu(x) for x in text(1, 1024, DIM))
        host = kvant.Tensor(
            [kvant.Codec("trellis-4:center=first,norm=first", DIM)] * KV_HEADS, n_blocks=16
        )
        host.write(np.arange(1024), k.cpu().numpy())
        table = torch.arange(16, dtype=torch.int32, device="cuda")
        slots = torch.arange(1024, device="cuda")
        paged = kvant.PagedCache("trellis-4:transform=first", "f16", KV_HEADS, DIM, n_blocks=16)
        paged.learn(k, q)
        paged.append(k, v, slots)
        rows = [paged.decode(role, table, dtype=torch.float32) for role in "kv"]
        groups = q.view(1024, KV_HEADS, -1, DIM)
        wrong = [
            (groups * (x - k)[:, :, None]).sum(3).square().mean().sqrt()
            for x in (rows[0], on_gpu(host.read(0, 1024)))
        ]
        self.assertLess(wrong[0], 0.7 * wrong[1])
        newest = q[-3:].contiguous() / 16
        lengths = torch.tensor([1024], dtype=torch.int32, device="cuda")
        got = paged.attention(newest[None], table[None], lengths)[0]
        mask = torch.ones(3, 1024, device="cuda").tril(1021).bool()[:, None]
        spread = [x.repeat_interleave(q.shape[1] // KV_HEADS, 1).transpose(0, 1) for x in rows]
        scores = (newest.transpose(0, 1) @ spread[0].transpose(1, 2)).transpose(0, 1) * DIM**-0.5
        wanted = (
            torch.softmax(scores.masked_fill(~mask, -torch.inf), -1).transpose(0, 1) @ spread[1]
        )
        self.assertLess(
            (got - wanted.transpose(0, 1)).abs().max().item(), 0.02 * v.abs().max().item()
        )
        for words, bad in (("k: ", (k[:, :1], q)), ("q: ", (k, q[:9]))):
            self.refused(ValueError, words, paged.learn, *bad)


if __name__ == "__main__":
    unittest.main()
