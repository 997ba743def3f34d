"""torch.ops.kvant: PyTorch's own check of each operator, the bytes of kvant.Codec, caches, compiled
functions.
"""

import unittest

import models  # noqa: F401  puts the package on the path
import torch
from common import TestCase, np
from torch.library import opcheck

import kvant
import kvant.torch

ops = torch.ops.kvant
KV_HEADS, HEADS, DIM = 2, 4, 64


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Rows(TestCase):
    def test_opcheck(self):
        for rows in (normal(1, 100, DIM), normal(1, 64, DIM).to(torch.bfloat16)):
            opcheck(ops.encode, (rows, "trellis-4", "k"))
            opcheck(ops.encode, (rows, "int-8", "v", normal(2, DIM), normal(3, DIM).abs() + 1))
            opcheck(
                ops.decode, (ops.encode(rows, "trellis-4", "k"), "trellis-4", "k", DIM, len(rows))
            )

    def test_bytes_are_those_of_a_codec(self):
        rows, center = normal(1, 100, DIM), normal(2, DIM)
        for spec in ("int-4", "turboquant-4", "trellis-4"):
            for role in "kv":
                codec = kvant.Codec(spec, DIM, role)
                pages = ops.encode(rows.to(torch.float16), spec, role, center)
                wanted = codec.encode(rows.to(torch.float16).float(), center.numpy())
                self.assertTrue(np.array_equal(pages.numpy(), wanted))
                back = ops.decode(pages, spec, role, DIM, 90, center)
                self.assertTrue(
                    np.array_equal(back.numpy(), codec.decode(wanted, 90, center.numpy()))
                )

    def test_compiled(self):
        there_and_back = lambda x: (
            ops.decode(ops.encode(x * 2, "int-4", "k"), "int-4", "k", DIM, 70) / 2
        )  # noqa: E731
        compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
        self.assertTrue(
            torch.equal(compiled(normal(1, 70, DIM)), there_and_back(normal(1, 70, DIM)))
        )

    def test_refusals(self):
        self.refused(
            ValueError, "rows|float64", ops.encode, normal(1, 64, DIM).double(), "int-4", "k"
        )
        self.refused(kvant.Error, "no-such", ops.encode, normal(1, 64, DIM), "no-such", "k")


class Caches(TestCase):
    def setUp(self):
        shape = dict(n_layers=2, n_heads=HEADS, n_kv_heads=KV_HEADS, head_dim=DIM, max_sequences=2)
        self.cache = kvant.Cache(**shape, max_tokens=4096, k="turboquant-4")
        self.sequences = [self.cache.new_sequence() for _ in range(2)]
        self.number, self.lengths = kvant.torch.register(self.cache)
        self.append(70)

    def append(self, n, seed=1):
        k, v = normal(seed, 2, n, KV_HEADS, DIM), normal(seed + 1, 2, n, KV_HEADS, DIM)
        ops.cache_append(self.lengths, k, v, self.number, 1, self.sequences)
        return k, v

    def arguments(self, q):
        return self.lengths, q, self.number, 1, self.sequences, DIM

    def test_opcheck(self):
        rows = normal(1, 2, 5, KV_HEADS, DIM)
        opcheck(ops.cache_append, (self.lengths, rows, rows, self.number, 1, self.sequences))
        q = normal(2, 2, 3, HEADS, DIM)
        opcheck(ops.cache_attend, self.arguments(q))
        opcheck(ops.cache_attend, self.arguments(q.to(torch.bfloat16)), {"window": 4, "scale": 0.3})

    def test_what_a_cache_attends_to(self):
        q = normal(3, 2, 3, HEADS, DIM)
        self.assertEqual(self.lengths.tolist(), [0, 70])
        mask = torch.zeros(2, 3, 70, dtype=torch.float16)
        mask[:, :, :9] = -torch.inf
        sinks = normal(4, HEADS)
        for ours, theirs in (
            ({}, {}),
            (
                {"window": 9, "scale": 0.2, "softcap": 3.0},
                {"window": 9, "scale": 0.2, "logit_softcap": 3.0},
            ),
            (
                {"mask": mask, "sinks": sinks, "causal": False},
                {"mask": mask[0].numpy(), "sinks": sinks.numpy(), "causal": False},
            ),
        ):
            got = ops.cache_attend(*self.arguments(q), **ours)
            for i, sequence in enumerate(self.sequences):
                wanted = self.cache.attend(1, sequence, q[i].numpy(), **theirs)
                self.assertTrue(np.array_equal(got[i].numpy(), wanted), ours)

    def test_a_compiled_step_appends_before_it_attends(self):
        def step(k, v, q):
            ops.cache_append(self.lengths, k, v, self.number, 1, self.sequences)
            return ops.cache_attend(*self.arguments(q)) * 2

        k = normal(5, 2, 1, KV_HEADS, DIM)
        v = normal(6, 2, 1, KV_HEADS, DIM)
        q = normal(7, 2, 1, HEADS, DIM)
        before = ops.cache_attend(*self.arguments(q))
        got = torch.compile(step, fullgraph=True, backend="aot_eager")(k, v, q)
        self.assertEqual(
            (self.lengths.tolist(), self.cache.length(self.sequences[0], 1)), ([0, 71], 71)
        )
        self.assertTrue(torch.equal(got, ops.cache_attend(*self.arguments(q)) * 2))
        self.assertFalse(torch.equal(got, before * 2))

    def test_tensors_are_arrays_for_the_cache(self):
        """DLPack tensors, without PyTorch's operators."""
        q = normal(8, 3, HEADS, DIM)
        out = torch.empty(3, HEADS, DIM)
        self.assertIs(self.cache.attend(1, self.sequences[0], q, out=out), out)
        self.assertTrue(
            np.array_equal(out.numpy(), self.cache.attend(1, self.sequences[0], q.numpy()))
        )
        self.refused(
            TypeError, "q: |NumPy", self.cache.attend, 1, self.sequences[0], q.to(torch.bfloat16)
        )

    def test_a_cache_that_is_gone(self):
        arguments = self.arguments(normal(2, 2, 1, HEADS, DIM))
        del self.cache
        self.refused(ValueError, "gone", ops.cache_attend, *arguments)


if __name__ == "__main__":
    unittest.main()
