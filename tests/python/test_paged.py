"""kvant.PagedCache without a GPU: the calls that it refuses, and the arguments that reach the
library. PyTorch and the GPU are mocks.
"""

import pathlib
import sys
import types
import unittest
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "mock_torch"), str(HERE.parents[1] / "integrations" / "python")]

import torch  # noqa: E402
from torch import Tensor, bfloat16, float16, float32, float64, int32, int64  # noqa: E402

import kvant  # noqa: E402
from kvant import library as bindings, structs  # noqa: E402

KV_HEADS, DIM, BLOCKS, OPEN = 2, 64, 10, 3


class Library:
    """A libkvant with a GPU that answers and keeps the last arguments of each call."""

    def __init__(self):
        self._cpu, self._made = bindings._open(), 0
        self.calls, self.statuses, self.workspace = {}, {}, 4096

    def reset(self):
        self.calls, self.statuses = {}, {}

    def kvant_cuda_codec_from(self, source, handle, text, size):
        handle.value = 16 + self._made
        self._made += 1
        text.value = b"not on the GPU"
        return self.statuses.get("codec_from", 0)

    def kvant_cuda_codec_create_open(self, sealed, handle):
        handle.value = sealed.value + 16
        return 0

    def kvant_cuda_codec_get_info(self, handle, info):
        info.page_bytes = 8192 if handle.value >= 32 else 2304
        return 0

    def kvant_cuda_codec_free(self, handle):
        handle._obj.value = None

    def kvant_cuda_attention_check(self, k, v, text, size):
        text.value = b"no such pair"
        return self.statuses.get("attention_check", 0)

    def kvant_cuda_available(self, text, size):
        text.value = b"no GPU"
        return self.statuses.get("available", 0)

    def kvant_cuda_attention_workspace(self, head_dim):
        return self.workspace

    def __getattr__(self, name):
        if not name.startswith("kvant_cuda_"):
            return getattr(self._cpu, name)

        def call(args, stream):
            kind = {"append": structs.CudaAppendArgs, "seal": structs.CudaSealArgs}
            kind |= {"attention": structs.CudaAttentionArgs, "decode": structs.CudaDecodeArgs}
            what = name.removeprefix("kvant_cuda_")
            self.calls[what] = kind[what].from_buffer_copy(args)
            self.stream = stream
            return self.statuses.get(what, 0)

        return call


def rows(n=5, dtype=float16, **rest):
    return Tensor((n, KV_HEADS, DIM), dtype, **rest)


class Calls(unittest.TestCase):
    def setUp(self):
        self.library = bindings._library = Library()
        self.addCleanup(setattr, bindings, "_library", None)
        self.cache = kvant.PagedCache("int-4", "int-4", KV_HEADS, DIM, BLOCKS, OPEN)
        self.sealed_only = kvant.PagedCache("int-4", "int-4", KV_HEADS, DIM, BLOCKS)
        self.library.reset()

    def refused(self, error, words, call, *arguments, **named):
        """The error's message names the argument, and the library is not called."""
        with self.assertRaises(error) as raised:
            call(*arguments, **named)
        for word in words.split("|"):
            self.assertIn(word, str(raised.exception))
        self.assertEqual(self.library.calls, {})


class Append(Calls):
    def append(self, k=None, v=None, slots=None, **named):
        slots = Tensor((5,), int64) if slots is None else slots
        self.cache.append(rows() if k is None else k, rows() if v is None else v, slots, **named)

    def test_right_ones_arrive(self):
        k, v = rows(dtype=bfloat16), rows(dtype=bfloat16, strides=(3 * KV_HEADS * DIM, DIM, 1))
        slots, refused = Tensor((5,), int64), Tensor((1,), int32)
        center, scale = Tensor((KV_HEADS, DIM), float32), Tensor((KV_HEADS, DIM), float32)
        self.append(k, v, slots, k_center=center, v_scale=scale, refused=refused)
        args = self.library.calls["append"]
        self.assertEqual((args.type, args.n_tokens, args.n_kv_heads), (2, 5, KV_HEADS))
        self.assertEqual((args.slots, args.refused), (slots.data_ptr(), refused.data_ptr()))
        self.assertEqual(
            (args.k.rows, args.k.token_stride, args.k.head_stride),
            (k.data_ptr(), KV_HEADS * DIM, DIM),
        )
        self.assertEqual((args.v.rows, args.v.token_stride), (v.data_ptr(), 3 * KV_HEADS * DIM))
        self.assertEqual((args.k.center, args.k.scale), (center.data_ptr(), None))
        self.assertEqual((args.v.center, args.v.scale), (None, scale.data_ptr()))
        self.assertEqual((args.k.codec, args.v.codec), (16, 17))
        self.assertEqual(args.k.pages.base, self.cache.pool.data_ptr())
        self.assertEqual(args.v.pages.base, self.cache.pool.data_ptr() + KV_HEADS * 2304)
        self.assertEqual(self.library.stream, 77)
        self.append(to_open=True)
        self.assertEqual(self.library.calls["append"].k.codec, 32)

    def test_rows(self):
        for name in "kv":
            for error, words, bad in (
                (ValueError, "shape", rows(4)),
                (ValueError, "shape|[5, 2, 64]", Tensor((5, KV_HEADS + 1, DIM), float16)),
                (ValueError, "shape", Tensor((5, KV_HEADS, DIM - 1), float16)),
                (ValueError, "shape", Tensor((5, KV_HEADS * DIM), float16)),
                (TypeError, "float64", rows(dtype=float64)),
                (TypeError, "int32", rows(dtype=int32)),
                (ValueError, "cpu|cuda:0", rows(on="cpu")),
                (ValueError, "cuda:1", rows(on="cuda:1")),
                (ValueError, "contiguous", rows(strides=(KV_HEADS * DIM * 2, DIM * 2, 2))),
                (TypeError, "tensor|list", [1.0]),
            ):
                self.refused(error, f"{name}: |{words}", self.append, **{name: bad})

    def test_dtypes_of_k_and_v_are_one(self):
        self.refused(TypeError, "v: |float32|float16", self.append, v=rows(dtype=float32))

    def test_slots(self):
        for error, words, bad in (
            (ValueError, "shape", Tensor((5, 1), int64)),
            (TypeError, "int32", Tensor((5,), int32)),
            (ValueError, "cpu", Tensor((5,), int64, on="cpu")),
            (ValueError, "contiguous", Tensor((5,), int64, strides=(2,))),
        ):
            self.refused(error, f"slots: |{words}", self.append, slots=bad)
        self.refused(ValueError, "k: |shape", self.append, slots=Tensor((6,), int64))

    def test_centres_and_scales(self):
        for name in ("k_center", "v_center", "k_scale", "v_scale"):
            for error, words, bad in (
                (TypeError, "float16", Tensor((KV_HEADS, DIM), float16)),
                (ValueError, "shape", Tensor((DIM,), float32)),
                (ValueError, "shape", Tensor((KV_HEADS + 1, DIM), float32)),
                (ValueError, "cpu", Tensor((KV_HEADS, DIM), float32, on="cpu")),
                (ValueError, "contiguous", Tensor((KV_HEADS, DIM), float32, strides=(0, 1))),
            ):
                self.refused(error, f"{name}: |{words}", self.append, **{name: bad})

    def test_refused_word(self):
        self.refused(TypeError, "refused: |int64", self.append, refused=Tensor((1,), int64))
        self.refused(ValueError, "refused: |shape", self.append, refused=Tensor((2,), int32))
        self.refused(
            ValueError, "refused: |cpu", self.append, refused=Tensor((1,), int32, on="cpu")
        )

    def test_open_blocks_are_needed(self):
        slots = Tensor((5,), int64)
        self.refused(
            ValueError,
            "n_open_blocks",
            self.sealed_only.append,
            rows(),
            rows(),
            slots,
            to_open=True,
        )

    def test_numbers_are_read_when_asked_for(self):
        cache = kvant.PagedCache("int-4", "int-4", KV_HEADS, DIM, BLOCKS, OPEN, check_numbers=True)
        self.library.reset()
        last = Tensor((5,), int64, values=(-1, 0, 64 * BLOCKS - 1))
        beyond = Tensor((5,), int64, values=(0, 64 * BLOCKS))
        self.refused(ValueError, "slots: |640", cache.append, rows(), rows(), beyond)
        self.refused(ValueError, "slots: ", cache.append, rows(), rows(), last, to_open=True)
        cache.append(rows(), rows(), last)
        self.assertEqual(self.library.calls["append"].n_tokens, 5)

    def test_errors_of_the_library(self):
        self.library.statuses["append"] = 30
        with self.assertRaises(kvant.Error) as raised:
            self.append()
        self.assertEqual(raised.exception.status, 30)


class Seal(Calls):
    def test_right_ones_arrive(self):
        numbers = [Tensor((3,), int32) for _ in range(3)]
        self.cache.seal(*numbers)
        args = self.library.calls["seal"]
        self.assertEqual((args.n_blocks, args.n_kv_heads), (3, KV_HEADS))
        self.assertEqual((args.from_, args.to, args.tokens), tuple(t.data_ptr() for t in numbers))
        self.assertEqual(args.k.open.base, self.cache.open_pool.data_ptr())

    def test_wrong_ones(self):
        good, names = Tensor((3,), int32), ("open_blocks", "blocks", "tokens")
        for at, name in enumerate(names):
            for error, words, bad in (
                (TypeError, "int64", Tensor((3,), int64)),
                (ValueError, "shape", Tensor((3, 1), int32)),
                (ValueError, "cpu", Tensor((3,), int32, on="cpu")),
                (ValueError, "contiguous", Tensor((3,), int32, strides=(2,))),
            ):
                arguments = [good] * 3
                arguments[at] = bad
                self.refused(error, f"{name}: |{words}", self.cache.seal, *arguments)
        self.refused(ValueError, "blocks: |shape", self.cache.seal, good, Tensor((4,), int32))
        self.refused(ValueError, "tokens: |shape", self.cache.seal, good, good, Tensor((4,), int32))
        self.refused(ValueError, "n_open_blocks", self.sealed_only.seal, good, good)


class Attention(Calls):
    BATCH, HEADS, PER_ROW = 4, 6, 5

    def arguments(self):
        return {
            "q": Tensor((self.BATCH, self.HEADS, DIM), bfloat16),
            "block_table": Tensor((self.BATCH, self.PER_ROW), int32),
            "lengths": Tensor((self.BATCH,), int32),
        }

    def test_right_ones_arrive(self):
        given = self.arguments()
        given["block_table"] = Tensor((self.BATCH, self.PER_ROW), int32, strides=(9, 1))
        lse = Tensor((self.BATCH, self.HEADS), float32)
        out = Tensor((self.BATCH, self.HEADS, DIM), bfloat16)
        self.assertIs(self.cache.attention(**given, lse=lse, out=out), out)
        args = self.library.calls["attention"]
        self.assertEqual(
            (args.batch, args.n_heads, args.n_kv_heads), (self.BATCH, self.HEADS, KV_HEADS)
        )
        self.assertEqual((args.table_stride, args.blocks_per_row), (9, self.PER_ROW))
        self.assertEqual(
            (args.q, args.out, args.lse), (given["q"].data_ptr(), out.data_ptr(), lse.data_ptr())
        )
        self.assertEqual((args.lengths, args.type), (given["lengths"].data_ptr(), 2))
        self.assertEqual(args.workspace_bytes, 4096)
        self.assertAlmostEqual(args.scale, DIM**-0.5)
        self.assertEqual(
            self.cache.attention(**self.arguments()).shape, (self.BATCH, self.HEADS, DIM)
        )

    def test_keys_with_a_centre(self):
        """Scores lack the centre's part, which softmax alone ignores."""
        sinks, words = Tensor((self.HEADS,), float32), "logit_softcap|sinks|centre"
        self.cache.attention(**self.arguments(), logit_softcap=5.0, sinks=sinks)
        self.cache.append(
            rows(), rows(), Tensor((5,), int64), k_center=Tensor((KV_HEADS, DIM), float32)
        )
        self.cache.attention(**self.arguments())
        self.library.reset()
        for options in {"logit_softcap": 5.0}, {"sinks": sinks}:
            self.refused(ValueError, words, self.cache.attention, **self.arguments(), **options)

    def test_many_rows(self):
        """From 385 rows of a kv head on, caches share a workspace with scratch."""
        workspaces = []
        for tokens in (384 * KV_HEADS // self.HEADS, 400, 401):
            given = self.arguments() | {
                "q": Tensor((self.BATCH, tokens, self.HEADS, DIM), bfloat16)
            }
            self.cache.attention(**given)
            args = self.library.calls["attention"]
            workspaces.append((args.workspace, args.workspace_bytes))
        self.assertEqual(
            [size for _, size in workspaces], [4096, 4096 + (129 << 20), 4096 + (129 << 20)]
        )
        self.assertEqual(workspaces[1], workspaces[2])

    def test_streams(self):
        """Kernels count in a workspace. So two streams never have the same one, and one stream
        keeps its own.
        """
        seen = {}
        for stream in (77, 78, 77, 78):
            with mock.patch.object(
                torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=stream)
            ):
                for tokens in (1, 400):
                    given = self.arguments() | {
                        "q": Tensor((self.BATCH, tokens, self.HEADS, DIM), bfloat16)
                    }
                    self.cache.attention(**given)
                    workspace = self.library.calls["attention"].workspace
                    self.assertEqual(seen.setdefault((stream, tokens), workspace), workspace)
        self.assertEqual(len(set(seen.values())), 4)

    def test_wrong_ones(self):
        batch, heads, per_row = self.BATCH, self.HEADS, self.PER_ROW
        strides = (heads * DIM * 2, DIM * 2, 2)
        for name, error, words, bad in (
            ("q", ValueError, "shape", Tensor((batch, heads, DIM + 1), bfloat16)),
            ("q", ValueError, "shape", Tensor((batch, heads * DIM), bfloat16)),
            ("q", ValueError, "multiple of 2", Tensor((batch, 5, DIM), bfloat16)),
            ("q", ValueError, "0 sequences", Tensor((0, heads, DIM), bfloat16)),
            ("q", TypeError, "float64", Tensor((batch, heads, DIM), float64)),
            ("q", ValueError, "cpu", Tensor((batch, heads, DIM), bfloat16, on="cpu")),
            ("q", ValueError, "contiguous", Tensor((batch, heads, DIM), bfloat16, strides=strides)),
            ("q", ValueError, "shape", Tensor((2 * batch, heads, DIM), bfloat16)),
            ("block_table", ValueError, "shape", Tensor((batch - 1, per_row), int32)),
            ("block_table", ValueError, "at least one block", Tensor((batch, 0), int32)),
            ("block_table", ValueError, "shape", Tensor((batch * per_row,), int32)),
            ("block_table", TypeError, "int64", Tensor((batch, per_row), int64)),
            ("block_table", ValueError, "cuda:1", Tensor((batch, per_row), int32, on="cuda:1")),
            (
                "block_table",
                ValueError,
                "contiguous",
                Tensor((batch, per_row), int32, strides=(1, batch)),
            ),
            ("lengths", ValueError, "shape", Tensor((batch - 1,), int32)),
            ("lengths", ValueError, "shape", Tensor((batch, 1), int32)),
            ("lengths", TypeError, "int64", Tensor((batch,), int64)),
            ("lengths", ValueError, "cpu", Tensor((batch,), int32, on="cpu")),
            ("lengths", ValueError, "contiguous", Tensor((batch,), int32, strides=(0,))),
            ("out", ValueError, "shape", Tensor((batch, heads - 2, DIM), bfloat16)),
            ("out", TypeError, "float16", Tensor((batch, heads, DIM), float16)),
            ("out", ValueError, "cpu", Tensor((batch, heads, DIM), bfloat16, on="cpu")),
            (
                "out",
                ValueError,
                "overlap",
                Tensor((batch, heads, DIM), bfloat16, strides=(0, DIM, 1)),
            ),
            (
                "out",
                ValueError,
                "overlap",
                Tensor((batch, heads, DIM), bfloat16, strides=(heads * DIM, 8, 1)),
            ),
            ("lse", ValueError, "shape", Tensor((batch,), float32)),
            ("lse", TypeError, "bfloat16", Tensor((batch, heads), bfloat16)),
            (
                "lse",
                ValueError,
                "contiguous",
                Tensor((batch, heads), float32, strides=(heads * 2, 1)),
            ),
            ("v_center", TypeError, "float16", Tensor((KV_HEADS, DIM), float16)),
            ("k_scale", ValueError, "shape", Tensor((heads, DIM), float32)),
            ("v_scale", ValueError, "cpu", Tensor((KV_HEADS, DIM), float32, on="cpu")),
            ("scale", ValueError, "nan", float("nan")),
        ):
            arguments = self.arguments() | {name: bad}
            named = "block_table" if name == "q" and bad.shape[0] == 2 * batch else name
            self.refused(error, f"{named}: |{words}", self.cache.attention, **arguments)

    def test_numbers_are_read_when_asked_for(self):
        cache = kvant.PagedCache("int-4", "int-4", KV_HEADS, DIM, BLOCKS, OPEN, check_numbers=True)
        self.library.reset()
        shape = (self.BATCH, self.PER_ROW)
        for values in ((0, BLOCKS), (-OPEN - 1, 0)):
            arguments = self.arguments() | {"block_table": Tensor(shape, int32, values=values)}
            self.refused(ValueError, "block_table: ", cache.attention, **arguments)
        cache.attention(
            **self.arguments() | {"block_table": Tensor(shape, int32, values=(-OPEN, BLOCKS - 1))}
        )
        self.assertEqual(self.library.calls["attention"].batch, self.BATCH)


class Decode(Calls):
    def test_right_ones_arrive(self):
        blocks = Tensor((3,), int32)
        self.assertEqual(
            self.cache.decode("v", blocks, dtype=float32).shape, (3 * 64, KV_HEADS, DIM)
        )
        args = self.library.calls["decode"]
        self.assertEqual(
            (args.codec, args.blocks, args.n_blocks, args.type), (17, blocks.data_ptr(), 3, 0)
        )
        self.library.reset()
        self.assertEqual(self.cache.decode("k", Tensor((0,), int32)).shape, (0, KV_HEADS, DIM))
        self.assertEqual(self.library.calls, {})

    def test_wrong_ones(self):
        good = Tensor((3,), int32)
        self.refused(ValueError, "role: |'q'", self.cache.decode, "q", good)
        self.refused(ValueError, "dtype: |int32", self.cache.decode, "k", good, dtype=int32)
        self.refused(TypeError, "blocks: |int64", self.cache.decode, "k", Tensor((3,), int64))
        self.refused(ValueError, "blocks: |shape", self.cache.decode, "k", Tensor((3, 3), int32))
        self.refused(
            ValueError,
            "center: |shape",
            self.cache.decode,
            "k",
            good,
            center=Tensor((DIM,), float32),
        )
        self.refused(ValueError, "n_open_blocks", self.sealed_only.decode, "k", good, is_open=True)


class Creation(Calls):
    def test_wrong_numbers(self):
        for named, error, words in (
            ({"n_kv_heads": 0}, ValueError, "n_kv_heads: 0"),
            ({"n_kv_heads": 2.0}, TypeError, "n_kv_heads: |2.0"),
            ({"n_kv_heads": True}, ValueError, "n_kv_heads: True"),
            ({"head_dim": 513}, ValueError, "head_dim: 513"),
            ({"n_blocks": 0}, ValueError, "n_blocks: 0"),
            ({"n_open_blocks": -1}, ValueError, "n_open_blocks: -1"),
            ({"seed": -1}, ValueError, "seed: -1"),
            ({"seed": 2**64}, ValueError, "seed: "),
            ({"k_spec": b"int-4"}, TypeError, "spec: |b'int-4'"),
            ({"device": "cpu"}, ValueError, "device: |cpu"),
        ):
            good = dict(
                k_spec="int-4", v_spec="int-4", n_kv_heads=KV_HEADS, head_dim=DIM, n_blocks=BLOCKS
            )
            self.refused(error, words, kvant.PagedCache, **good | named)

    def test_the_library_refuses(self):
        for what, words in (
            ("codec_from", "not on the GPU"),
            ("attention_check", "no such pair"),
            ("available", "no GPU"),
        ):
            self.library.statuses = {what: 30}
            with self.assertRaises(kvant.Error) as raised:
                kvant.PagedCache("int-4", "int-4", KV_HEADS, DIM, BLOCKS)
            self.assertIn(words, str(raised.exception))
        self.library.statuses, self.library.workspace = {}, 0
        with self.assertRaises(kvant.Error) as raised:
            kvant.PagedCache("int-4", "int-4", KV_HEADS, DIM, BLOCKS)
        self.assertIn("workspace", str(raised.exception))


if __name__ == "__main__":
    unittest.main()
