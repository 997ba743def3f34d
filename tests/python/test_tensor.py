"""kvant.Tensor and kvant.attention: written rows are read back, blocks move, attention equals
NumPy's.
"""

import unittest

from common import TestCase, normal, np
from reference import attention, rounding

import kvant

HEADS, DIM = 2, 64


def made(spec, role="k", n_blocks=4, **rest):
    return kvant.Tensor([kvant.Codec(spec, DIM, role)] * HEADS, n_blocks=n_blocks, **rest)


class WriteAndRead(TestCase):
    def test_rows_come_back_from_any_slots(self):
        tensor, rows = made("f32"), normal(1, 100, HEADS, DIM)
        slots = np.random.default_rng(2).permutation(256)[:100]
        tensor.write(slots, rows)
        whole = tensor.read(0, 256)
        self.assertTrue(np.array_equal(whole[slots], rows))
        self.assertEqual(np.count_nonzero(whole.any((1, 2))), 100)
        self.assertEqual(tensor.read(256, 0).shape, (0, HEADS, DIM))

    def test_tensors_hold_what_codecs_encode(self):
        """Rows are the same in any batches and with any threads."""
        codec, rows = kvant.Codec("turboquant-3", DIM), normal(3, 128, HEADS, DIM)
        wanted = np.stack([codec.decode(codec.encode(rows[:, head])) for head in range(HEADS)], 1)
        one, other = made("turboquant-3", n_threads=1), made("turboquant-3", n_threads=2)
        one.write(np.arange(128), rows)
        for first in range(0, 128, 16):
            other.write(np.arange(first, first + 16), rows[first : first + 16])
        for tensor in (one, other):
            self.assertTrue(np.array_equal(tensor.read(0, 128), wanted))
        self.assertEqual(one.export_block(1), other.export_block(1))

    def test_info(self):
        tensor = made("int-4", "v")
        tensor.write(np.arange(64, 70), normal(4, 6, HEADS, DIM))
        info = tensor.info
        self.assertEqual(
            (info.role, info.n_kv_heads, info.head_dim, info.n_blocks), ("v", HEADS, DIM, 4)
        )
        self.assertEqual(
            (info.written_blocks, info.sealed_bytes), (1, HEADS * tensor.codecs[0].page_bytes)
        )

    def test_blocks_apart(self):
        """Blocks in memory with other bytes between them hold the same pages, and these bytes do
        not change.
        """
        rows, near = normal(6, 256, HEADS, DIM), made("int-4")
        near.write(np.arange(256), rows)
        size = near.info.sealed_bytes
        whole = np.full(4 * (size + 128) + 64, 0xA5, np.uint8)
        aligned = -whole.ctypes.data % 64
        memory = whole[aligned : aligned + 4 * (size + 128)].reshape(4, size + 128)
        memory[:, :size] = 0
        apart = made("int-4", memory=memory[:, :size])
        apart.write(np.arange(256), rows)
        self.assertEqual(
            [apart.export_block(i) for i in range(4)], [near.export_block(i) for i in range(4)]
        )
        self.assertTrue((memory[:, size:] == 0xA5).all())
        self.assertTrue(np.array_equal(apart.read(0, 256), near.read(0, 256)))
        for wrong, words in (
            (memory[:3], "memory"),
            (memory[:, : size - 64], "block|memory"),
            (memory[:, ::2], "block_stride|memory"),
        ):
            with self.assertRaisesRegex((ValueError, kvant.Error), words):
                made("int-4", memory=wrong)
        with self.assertRaisesRegex(kvant.Error, "fp16 rows"):
            made("int-4:sink=4", memory=memory)

    def test_clearing(self):
        tensor = made("f32")
        tensor.write(np.arange(256), normal(5, 256, HEADS, DIM))
        tensor.clear(1, 2)
        self.assertEqual(tensor.info.written_blocks, 2)
        self.assertFalse(tensor.read(64, 128).any())
        self.assertTrue(tensor.read(0, 64).any())
        tensor.clear()
        self.assertEqual(tensor.info.written_blocks, 0)

    def test_a_given_centre_replaces_that_of_the_first_rows(self):
        center = normal(6, HEADS, DIM)
        rows = (
            normal(7, 128, HEADS, DIM) + center
        )  # so that a centre of their own would not lower their error
        tensor = made("int-4:center=first")
        tensor.set_affine(center=center)
        tensor.write(np.arange(128), rows)
        codec = kvant.Codec("int-4", DIM)
        for head in range(HEADS):
            pages = codec.encode(rows[64:, head], center=center[head])
            wanted = codec.decode(pages, center=center[head])
            self.assertTrue(np.array_equal(tensor.read(64, 64)[:, head], wanted))
            block = tensor.block(1, head)
            self.assertEqual((block.state, block.written, block.scale), ("sealed", 2**64 - 1, None))
            self.assertTrue(np.array_equal(block.center, center[head]))
        self.refused(kvant.Error, "centre and scale", tensor.set_affine, center=center)

    def test_sequences_and_sinks(self):
        """The first rows of each sequence stay fp16."""
        tensor = made("int-2:sink=4", n_sequences=2, n_blocks=2)
        tensor.assign(1, 1, 0)
        rows = normal(8, 128, HEADS, DIM)
        tensor.write(np.arange(128), rows)
        self.assertEqual([tensor.block(i).state for i in range(2)], ["sink", "sink"])
        self.assertTrue(np.abs(tensor.read(0, 128) - rows).max() <= np.abs(rows).max() * 2.0**-11)


class Blocks(TestCase):
    def test_copies_and_exports_are_equal(self):
        tensor, rows = made("trellis-3"), normal(9, 64, HEADS, DIM)
        other = kvant.Tensor(tensor.codecs, n_blocks=4)
        tensor.write(np.arange(64), rows)
        tensor.copy(0, tensor, 2)
        tensor.copy(0, other, 3)
        other.import_block(1, tensor.export_block(0))
        for got in (tensor.read(128, 64), other.read(192, 64), other.read(64, 64)):
            self.assertTrue(np.array_equal(got, tensor.read(0, 64)))

    def test_damaged_and_foreign_blocks(self):
        tensor = made("int-4")
        tensor.write(np.arange(64), normal(10, 64, HEADS, DIM))
        data = bytearray(tensor.export_block(0))
        data[len(data) // 2] ^= 1
        self.assertEqual(
            self.refused(kvant.Error, "import", tensor.import_block, 1, bytes(data)).status, 70
        )
        self.assertEqual(
            self.refused(
                kvant.Error, "import", made("int-3").import_block, 1, tensor.export_block(0)
            ).status,
            70,
        )
        self.refused(kvant.Error, "import", tensor.import_block, 1, b"")
        self.assertFalse(tensor.read(64, 64).any())


class Attention(TestCase):
    def setUp(self):
        self.q = normal(11, 3, 6, DIM)
        self.k, self.v = made("turboquant-4"), made("int-4", "v")
        for seed, tensor in ((12, self.k), (13, self.v)):
            tensor.write(np.arange(200), normal(seed, 200, HEADS, DIM))

    def compare(self, order=slice(None), **options):
        """The tokens of the sequence are in the blocks of `order`, without rounding to integers."""
        k, v = (
            x.read(0, 256).reshape(4, 64, HEADS, DIM)[order].reshape(-1, HEADS, DIM)[:190]
            for x in (self.k, self.v)
        )
        table = np.arange(4, dtype=np.int32)[order]
        out = kvant.attention(self.k, self.v, self.q, 190, table, exact=True, **options)
        known = {
            name: value
            for name, value in options.items()
            if name not in ("out", "lse", "logit_softcap")
        }
        wanted, lse, size = attention(
            self.q, k, v, DIM**-0.5, softcap=options.get("logit_softcap", 0), **known
        )
        bound = rounding(self.q, k, v, DIM**-0.5, size)
        self.assertTrue((np.abs(out - wanted).max(2) <= bound).all())
        return lse

    def test_causal(self):
        self.compare()
        self.compare(order=[2, 0, 1])
        self.compare(causal=False)

    def test_options(self):
        self.compare(window=70)
        self.compare(logit_softcap=5.0)
        mask = np.random.default_rng(14).uniform(-3, 0, (3, 190)).astype(np.float16)
        mask[:, 50:60] = -np.inf
        self.compare(mask=mask)
        lse = np.zeros((3, 6), np.float32)
        wanted = self.compare(sinks=normal(15, 6), lse=lse)
        self.assertTrue((np.abs(lse - wanted) <= 1e-5 * np.abs(wanted)).all())

    def test_first_block_and_outputs(self):
        out = np.empty((3, 6, DIM), np.float32)
        self.assertIs(kvant.attention(self.k, self.v, self.q, 100, first_block=1, out=out), out)
        again = kvant.attention(
            self.k, self.v, self.q, 100, np.array([1, 2], np.int32), n_threads=1
        )
        self.assertTrue(np.array_equal(out, again))

    def test_refusals(self):
        call, k, v, q = kvant.attention, self.k, self.v, self.q
        self.refused(
            ValueError,
            "block_table: |2 blocks are too few for 190",
            call,
            k,
            v,
            q,
            190,
            np.zeros(2, np.int32),
        )
        self.refused(ValueError, "block_table: |4", call, k, v, q, 64, np.full(1, 4, np.int32))
        self.refused(TypeError, "block_table: |int64", call, k, v, q, 64, np.zeros(1, np.int64))
        self.refused(kvant.Error, "more blocks", call, k, v, q, 1000)
        self.refused(kvant.Error, "causal", call, k, v, q, 2)
        self.refused(kvant.Error, "attention", call, k, v, normal(1, 3, 5, DIM), 64)
        self.refused(
            ValueError,
            "out: |contiguous",
            call,
            k,
            v,
            q,
            64,
            out=np.empty((6, 3, DIM), np.float32).swapaxes(0, 1),
        )
        self.refused(
            ValueError, "mask: |[3, 64]", call, k, v, q, 64, mask=np.zeros((3, 63), np.float16)
        )
        self.refused(
            TypeError, "mask: |float32", call, k, v, q, 64, mask=np.zeros((3, 64), np.float32)
        )
        self.refused(ValueError, "scale: -1", call, k, v, q, 64, scale=-1)


class Refusals(TestCase):
    def test_creation(self):
        codec = kvant.Codec("int-4", DIM)
        self.refused(TypeError, "codecs: ", kvant.Tensor, ["int-4"])
        self.refused(TypeError, "codecs: ", kvant.Tensor, [])
        self.refused(ValueError, "n_blocks: 0", kvant.Tensor, [codec], n_blocks=0)
        self.refused(ValueError, "n_threads: 0", kvant.Tensor, [codec], n_threads=0)
        self.refused(kvant.Error, "tensor", kvant.Tensor, [codec, kvant.Codec("int-4", DIM, "v")])

    def test_writes(self):
        tensor, rows = made("int-4"), normal(1, 3, HEADS, DIM)
        slots = np.arange(3)
        self.refused(TypeError, "slots: |int32", tensor.write, slots.astype(np.int32), rows)
        self.refused(ValueError, "slots: |0 to 255", tensor.write, np.array([0, 1, 256]), rows)
        self.refused(ValueError, "slots: |-1", tensor.write, np.array([0, 1, -1]), rows)
        self.refused(ValueError, "rows: |[2, 2, 64]", tensor.write, slots[:2], rows)
        self.refused(TypeError, "rows: |float16", tensor.write, slots, rows.astype(np.float16))
        rows[2, 1, 5] = np.nan
        self.assertEqual(
            self.refused(kvant.Error, "write|NaN", tensor.write, slots, rows).status, 50
        )
        self.assertEqual(tensor.info.written_blocks, 0)

    def test_reads_and_blocks(self):
        tensor = made("int-4")
        self.refused(ValueError, "n: 57", tensor.read, 200, 57)
        self.refused(ValueError, "first: 257", tensor.read, 257, 0)
        self.refused(ValueError, "block: 4", tensor.export_block, 4)
        self.refused(ValueError, "kv_head: 2", tensor.block, 0, 2)
        self.refused(ValueError, "block: -1", tensor.import_block, -1, b"")
        self.refused(ValueError, "n: 3", tensor.copy, 2, tensor, 0, 3)
        self.refused(ValueError, "first: 5", tensor.clear, 5)
        self.refused(kvant.Error, "assign", made("int-4", blocks_per_sequence=4).assign, 0, 0, 1)


if __name__ == "__main__":
    unittest.main()
