"""vLLM's backends without an engine: batches as vLLM describes them, compared with attention in
float64 over the rows that the codecs keep. The GPU's backend runs on a GPU, or on the mock
(tests/cuda/host) that KVANT_CUDA_LIBRARY names. test_choices.py tests what the backends choose.
"""

import dataclasses
import pathlib
import sys
import tempfile
import types
import unittest
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "pytorch")]

import models  # noqa: E402
import torch  # noqa: E402
from common import TestCase, np  # noqa: E402
from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheTensor,
    create_kv_cache_views,
)

import kvant  # noqa: E402
from kvant.vllm import batch, codecs, gpu, gpu_pages, pages  # noqa: E402
from steps import (  # noqa: E402
    BLOCKS,
    CHUNKS,
    CpuImpl,
    DECODES,
    DEVICE,
    DIM,
    DRAFTS,
    GROUP,
    HEADS,
    KV_HEADS,
    LAYER,
    LONG,
    PROMPTS,
    Step,
    attention,
    captured,
    chosen_as,
    made_builder,
    made_impl,
    made_memory,
    round_trip,
)


class Cases:
    kind = None

    def close(self, found, expected, dtype, stored="f32/f32"):
        """Outputs and queries are rounded to dtype. Weights and queries are rounded to fp16 on a
        GPU, and to 16-bit integers on a CPU. Codebooks are rounded to bytes: half a step of the
        largest level / 127 per rotated number, which adds up in a row. The mock computes in double
        precision.
        """
        in_double = self.kind is gpu.Impl and DEVICE == "cpu"
        ours = (
            2.0**-16
            if in_double
            else 2.0**-10
            if stored == "f32/f32"
            else 2.0**-5
            if "turboquant" in stored
            else 2.0**-8
        )
        unit = max(ours, {torch.float32: 0, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-7}[dtype])
        self.assertTrue(np.isfinite(found).all())
        self.assertLess(np.abs(found - expected).max(), unit * np.abs(expected).max())

    def check(
        self,
        stored,
        sequences,
        dtype=torch.float32,
        drafts=0,
        layer=LAYER,
        calibration=None,
        **options,
    ):
        made = made_impl(stored, calibration, kind=self.kind, **options)
        step = Step(sequences, dtype, layer)
        metadata = made_builder(drafts).build(0, step.common())
        named = {
            "window": options.get("window") or 0,
            "softcap": options.get("softcap") or 0.0,
            "sinks": options.get("sinks"),
        }
        if named["sinks"] is not None:
            named["sinks"] = named["sinks"].cpu().numpy()
        self.close(
            step.run(made, metadata), step.expected(round_trip(made, layer), **named), dtype, stored
        )
        return metadata

    def test_batches(self):
        for sequences, drafts in (
            (DECODES, 0),
            (DRAFTS, 4),
            (CHUNKS, 0),
            (PROMPTS, 0),
            (DECODES + CHUNKS + PROMPTS, 0),
        ):
            for stored in ("f32/f32", "turboquant4", "int-8/trellis-3"):
                with self.subTest(stored, sequences=sequences):
                    self.check(stored, sequences, drafts=drafts)

    def test_keys_of_the_first_layer(self):
        for stored in ("turboquant4", "trellis3"):
            with self.subTest(stored):
                made = made_impl(stored, kind=self.kind)
                self.assertEqual(made.stored.of_layer(0).k, "int-8")
                self.check(stored, DECODES + CHUNKS, layer=0)

    def test_types(self):
        for dtype in (torch.float16, torch.bfloat16):
            for stored in ("f32/f32", "int4", "trellis4"):
                with self.subTest(stored, dtype=dtype):
                    self.check(stored, DECODES + CHUNKS, dtype)

    def test_windows_softcap_sinks(self):
        sinks = torch.linspace(-2, 3, HEADS, device=DEVICE)
        for options in (
            {"window": 50},
            {"softcap": 2.0},
            {"sinks": sinks},
            {"window": 65, "softcap": 3.0},
        ):
            with self.subTest(**options):
                self.check("int-8/int-8", DECODES + CHUNKS + PROMPTS, **options)

    def test_chunked_attention(self):
        """Llama 4's chunks, by vLLM's builder, which makes a sequence from each part of a
        prompt.
        """
        local = create_chunked_local_attention_backend(gpu.Backend, 128).get_builder_cls()
        for stored in ("f32/f32", "turboquant4"):
            made = made_impl(stored, kind=self.kind)
            step = Step(
                [(300, 1), (256, 1), (257, 1), (250, 110), (200, 200), (128, 128)],
                torch.float32,
            )
            with mock.patch.object(batch, "Builder", local):
                builder = made_builder(spec=types.SimpleNamespace(block_size=64))
            found = step.run(made, builder.build(0, step.common()))
            self.close(found, step.expected(round_trip(made), chunk=128), torch.float32, stored)

    def test_calibrated(self):
        """Specs whose pages need numbers for each kv head, in a layer other than the first."""
        model = models.make("llama", head_dim=DIM)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "model.kvcal")
            kvant.calibrate(model, np.random.default_rng(1).integers(3, 300, 512)).save(path)
            for keys in (
                "int-8:transform=file",
                "int-8:transform=diagonal",
                "int-8:center=file,norm=file",
                "int-8:center=file",
            ):
                with self.subTest(keys):
                    self.check(
                        f"{keys},sink=0/int-8:center=file,sink=0",
                        DECODES + CHUNKS,
                        layer=1,
                        calibration=path,
                    )
            if self.kind is gpu.Impl:
                for keys in (
                    "int-8:transform=file",
                    "int-8:transform=diagonal",
                    "int-8:center=file,norm=file",
                ):
                    self.check_long(
                        f"{keys},sink=0/int-8:center=file,sink=0", layer=1, calibration=path
                    )
            for name in ("balanced", "fast"):
                with self.subTest(name):
                    self.check(
                        name, DECODES + DRAFTS, torch.bfloat16, drafts=4, layer=1, calibration=path
                    )


class Gpu(Cases, TestCase):
    kind = gpu.Impl

    def flash(self, window=0, sinks=None):
        """A mock of FlashAttention, and the arguments of its calls."""
        calls = []

        def call(q, k, v, out, cu_seqlens_q, cu_seqlens_k, **options):
            starts, key_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
            calls.append((starts, key_starts, tuple(out.shape[1:]), options))
            for i, (first, last) in enumerate(zip(starts, starts[1:])):
                keys = slice(key_starts[i], key_starts[i + 1])
                out[first:last] = torch.from_numpy(
                    attention(q[first:last].cpu(), k[keys].cpu(), v[keys].cpu(), window=window)
                ).to(out)

        return calls, (call, {"fa_version": 3})

    def test_prompts_by_flash_attention(self):
        """The arguments that reach FlashAttention. Whole prompts reach only FlashAttention."""
        calls, flash = self.flash(window=50)
        made = made_impl("f32/f32", window=50)
        step = Step(DECODES + CHUNKS + PROMPTS, torch.float16)
        made.flash = flash
        found = step.run(made, made_builder().build(0, step.common()))
        self.close(found, step.expected(round_trip(made), window=50), torch.float16)
        options = {
            "softmax_scale": DIM**-0.5,
            "causal": True,
            "window_size": [49, 0],
            "softcap": 0.0,
            "fa_version": 3,
        }
        options |= {"max_seqlen_q": 129, "max_seqlen_k": 129}
        self.assertEqual(calls, [([153, 183, 312], [153, 183, 312], (HEADS, DIM), options)])

    def check_long(self, stored, dtype=torch.float16, window=0, flash=None, layer=LAYER, **options):
        """For long parts, FlashAttention sees the past as the codecs keep it, and the part's own
        rows.
        """
        made = made_impl(stored, window=window or None, **options)
        step = Step(DECODES + LONG + PROMPTS, dtype, layer)
        calls, mock_device = self.flash(window)
        made.flash = flash or mock_device
        round_trips, expected = round_trip(made, layer), []
        for i, (n, m) in enumerate(step.sequences):
            rows = round_trips(*step.rows[i])
            if (n, m) in LONG + PROMPTS:
                rows = [
                    np.concatenate([x[: n - m], own[n - m :].float().numpy()])
                    for x, own in zip(rows, step.rows[i])
                ]
            expected.append(
                attention(step.queries[step.starts[i] : step.starts[i + 1]], *rows, window=window)
            )
        found = step.run(made, made_builder().build(0, step.common()))
        self.close(found, np.concatenate(expected), dtype, stored)
        return [call[:3] for call in calls]

    def test_long_parts_of_prompts(self):
        whole, prompts = (HEADS, DIM), ([332, 362, 491], [332, 362, 491], (HEADS, DIM))
        for stored in ("f32/f32", "turboquant4", "int-8/trellis-3"):
            with self.subTest(stored):
                calls = self.check_long(stored)
                self.assertEqual(
                    calls, [([3, 203], [0, 500], whole), ([203, 332], [0, 329], whole), prompts]
                )
        self.assertEqual(
            self.check_long("int4", window=70)[:2],
            [([3, 203], [0, 308], whole), ([203, 332], [0, 201], whole)],
        )
        rows = 2 * 2 * DIM * 500  # bytes of keys and values of a kv head, in fp16
        with (
            mock.patch.object(gpu_pages, "_ROWS_BYTES", rows),
            mock.patch.dict(gpu_pages._rows, clear=True),
        ):
            half = (GROUP, DIM)
            calls = self.check_long("int4")
            self.assertEqual(
                calls,
                [([3, 203], [0, 500], half)] * 2 + [([203, 332], [0, 329], half)] * 2 + [prompts],
            )

    def test_parts_of_prompts_that_are_too_long_for_rows(self):
        """A context whose rows have no room, of a single kv head either, is read from pages."""
        rows = 2 * 2 * DIM * 499  # one token too few for the part of 500 tokens
        with (
            mock.patch.object(gpu_pages, "_ROWS_BYTES", rows),
            mock.patch.dict(gpu_pages._rows, clear=True),
        ):
            calls = self.check_long("f32/f32")
        self.assertNotIn([0, 500], [call[1] for call in calls])
        self.assertEqual(calls[0][1], [0, 329])

    @unittest.skipIf(DEVICE == "cpu", "needs a GPU")
    def test_prompts_by_vllm_s_flash_attention(self):
        for window in (None, 50):
            made, step = made_impl("f32/f32", window=window), Step(CHUNKS + PROMPTS, torch.bfloat16)
            made.flash = gpu._flash_attention(DIM)
            self.assertIsNotNone(made.flash)
            found = step.run(made, made_builder().build(0, step.common()))
            self.close(found, step.expected(round_trip(made), window=window or 0), torch.bfloat16)
            for stored in ("f32/f32", "turboquant4"):
                self.check_long(stored, torch.bfloat16, window or 0, flash=made.flash)

    @unittest.skipIf(DEVICE == "cpu", "needs a GPU")
    def test_exact_rows_are_no_further_from_float64_than_flash_attention(self):
        made, step = made_impl("f32/f32"), Step([(200, 1), (500, 1), (900, 1)], torch.bfloat16)
        expected = step.expected(lambda *rows: rows)
        flash, options = gpu._flash_attention(DIM)
        theirs = []
        for q, (k, v) in zip(step.queries, step.rows):
            keys = torch.tensor([0, len(k)], dtype=torch.int32, device=DEVICE)
            at = dict(
                cu_seqlens_q=keys.clamp(max=1),
                cu_seqlens_k=keys,
                max_seqlen_q=1,
                max_seqlen_k=len(k),
                causal=True,
            )
            theirs.append(
                flash(
                    q[None].to(DEVICE),
                    k.to(DEVICE),
                    v.to(DEVICE),
                    softmax_scale=DIM**-0.5,
                    **at,
                    **options,
                )
            )
        found = [
            step.run(made, made_builder().build(0, step.common())),
            torch.cat(theirs).float().cpu().numpy(),
        ]
        found.append(torch.tensor(expected).bfloat16().double().numpy())
        ours, flash, rounded = (
            np.sqrt(np.square(x - expected).mean() / np.square(expected).mean()) for x in found
        )
        print(
            f"rms error: kvant {ours:.6f}, FlashAttention {flash:.6f}, "
            f"the output's rounding {rounded:.6f}"
        )
        self.assertLess(ours, 1.05 * flash)

    def test_steps_of_a_graph(self):
        """A captured decode step with other lengths, blocks and rows. Without a GPU it is called
        again.
        """
        for stored, sequences, drafts in (
            ("turboquant4", DECODES, 0),
            ("int4", DRAFTS, 4),
            ("trellis4", DECODES, 0),
        ):
            made, dtype = made_impl(stored), torch.float16
            last, first = Step(sequences, dtype), Step([(m + 1, m) for _, m in sequences], dtype)
            memory, tables = made_memory(made), torch.zeros_like(last.table).to(DEVICE)
            common = first.common()
            common.block_table_tensor = tables
            static = [x.to(DEVICE) for x in (*first.newest(), first.queries)]
            common.slot_mapping = static[2]
            out = torch.zeros_like(static[3])
            metadata = made_builder(drafts).build(0, common)

            def load(step):
                """Copies to the device before a step, as vLLM does."""
                for i, (n, m) in enumerate(step.sequences):
                    rows = [x[: n - m].to(DEVICE) for x in step.rows[i]]
                    made.do_kv_cache_update(
                        step.layer, *rows, memory, step.slots(i, 0, n - m).to(DEVICE)
                    )
                tables[:, : step.table.shape[1]] = step.table.to(DEVICE)
                common.seq_lens.copy_(torch.tensor([n for n, _ in step.sequences]))
                for to, x in zip(static, (*step.newest(), step.queries)):
                    to.copy_(x)

            def run():
                made.forward(
                    first.layer, static[3], *static[:2], memory, metadata, out.view(len(out), -1)
                )

            load(first)
            replay = captured(run)
            load(last)
            replay()
            self.close(out.float().cpu().numpy(), last.expected(round_trip(made)), dtype, stored)

    def test_a_row_that_is_refused_is_nobody_s(self):
        """In a block that vLLM cleared, the refused row's slot holds zeros, and other sequences do
        not see it. (On a GPU the host does not know.)
        """
        sequences, at = DECODES + CHUNKS, 200 - 30  # of the third sequence, in its past
        for stored, value in (("f32/f32", np.nan), ("turboquant4", np.inf)):
            expected = Step(sequences, torch.float32)
            for rows in expected.rows[2]:
                rows[at] = 0
            found = Step(sequences, torch.float32)
            found.rows[2][0][at], found.rows[2][1][at] = value, value
            found, expected = (
                step.run(made_impl(stored), made_builder().build(0, step.common()))
                for step in (found, expected)
            )
            np.testing.assert_allclose(found, expected, atol=1e-6)

    def test_memory_of_others(self):
        """Layers in one tensor, with blocks more than a page apart. Memory between the pages does
        not change.
        """
        made, step = made_impl("int4"), Step(CHUNKS, torch.float32)
        cell = codecs.cell_bytes(made.stored, DIM)
        whole = torch.full((BLOCKS, 3, KV_HEADS, 64, cell), 0xA5, dtype=torch.uint8, device=DEVICE)
        memory = whole[:, 1]
        memory.zero_()
        with mock.patch(f"{__name__}.made_memory", lambda *of: memory):
            found = step.run(made, made_builder().build(0, step.common()))
        self.close(found, step.expected(round_trip(made)), torch.float32, "int4")
        self.assertTrue(bool((whole[:, 0] == 0xA5).all()) and bool((whole[:, 2] == 0xA5).all()))

    def test_refusals(self):
        made, layer = made_impl("int4"), types.SimpleNamespace(layer_name="model.layers.0.attn")
        cell = codecs.cell_bytes(made.stored, DIM)
        rows = torch.zeros(1, KV_HEADS, DIM, device=DEVICE)
        slots = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        for shape, transposed in (
            ((4, KV_HEADS, 32, cell), False),
            ((4, 64, KV_HEADS, cell), True),
            ((4, KV_HEADS, 64, cell - 4), False),
        ):
            memory = torch.zeros(shape, dtype=torch.uint8, device=DEVICE)
            with self.assertRaisesRegex(ValueError, "block-size 64 and the layout LBHNC"):
                made.do_kv_cache_update(
                    layer, rows, rows, memory.transpose(1, 2) if transposed else memory, slots
                )
        step = Step(DECODES, torch.float32)
        with self.assertRaisesRegex(NotImplementedError, "causal"):
            made_builder().build(0, step.common(causal=torch.ones(3, dtype=torch.int32)))

    def test_keys_with_a_centre(self):
        """Scores of these keys lack a term, which sinks and softcaps would see."""
        for options in ({"softcap": 2.0}, {"sinks": torch.zeros(HEADS)}):
            for stored in ("int-8:center=file,sink=0/int-8", "int-8:transform=file,sink=0/int-8"):
                with self.assertRaisesRegex(NotImplementedError, "sinks or a softcap"):
                    made_impl(stored, "model.kvcal", **options)


@unittest.skipIf(DEVICE == "cuda", "tensors are on the GPU")
class Cpu(Cases, TestCase):
    kind = CpuImpl

    def test_rows_that_are_refused(self):
        """A row of NaNs, or beyond the range of a codec: sequences that see the row get NaN, and no
        other output changes.
        """
        sequences = DECODES + CHUNKS + PROMPTS
        of = 4  # index of a sequence with 300 tokens, of which 110 are queries
        for stored, value in (
            ("f32/f32", np.nan),
            ("turboquant4", np.inf),
            ("int8", -np.inf),
            ("int8", 3e38),
        ):
            for role in (0, 1):
                for token, window in ((250, None), (250, 30), (100, None), (100, 150), (299, None)):
                    with self.subTest(
                        stored=stored, value=value, role=role, token=token, window=window
                    ):
                        made = made_impl(stored, window=window, kind=self.kind)
                        step = Step(sequences, torch.float32)
                        expected = step.run(made, made_builder().build(0, step.common()))
                        step.rows[of][role][token, 1, 3] = value
                        made = made_impl(stored, window=window, kind=self.kind)
                        with self.assertLogs("vllm.kvant", "WARNING") as said:
                            found = step.run(made, made_builder().build(0, step.common()))
                        self.assertIn("its request's output is NaN", said.output[0])
                        first = int(step.starts[of]) + token - 190
                        blind = slice(
                            max(first, int(step.starts[of])),
                            min(first + (window or 300), int(step.starts[of + 1])),
                        )
                        self.assertTrue(np.isnan(found[blind]).all())
                        found[blind] = expected[blind]
                        np.testing.assert_array_equal(found, expected)

    def test_a_slot_is_whole_again_when_it_is_written_again(self):
        made, step = made_impl("f32/f32", kind=self.kind), Step(PROMPTS, torch.float32)
        memory, (good, values, _) = made_memory(made), step.newest()
        for keys in (good.clone().index_fill_(0, torch.tensor([30 + 70]), np.nan), good):
            out = torch.zeros(len(step.queries), HEADS * DIM)
            batch = made_builder().build(0, step.common())
            made.forward(step.layer, step.queries, keys, values, memory, batch, out)
            self.assertEqual(bool(torch.isnan(out[30 + 70 :]).all()), keys is not good)
            self.assertFalse(bool(torch.isnan(out[30 : 30 + 70]).any()))

    def test_queries_of_nan(self):
        made, step = made_impl("turboquant4", kind=self.kind), Step(DECODES + CHUNKS, torch.float32)
        expected = step.run(made, made_builder().build(0, step.common()))
        step.queries[20, 3] = np.nan
        found = step.run(made, made_builder().build(0, step.common()))
        self.assertTrue(np.isnan(found[20, 3]).all())
        found[20, 3] = expected[20, 3]
        np.testing.assert_array_equal(found, expected)

    def test_what_other_layers_left_in_blocks(self):
        """Numbers of recurrent layers, which may be NaNs as rows or scales, lie after a sequence's
        end.
        """
        for stored in ("f32/f32", "f16/f16", "int8", "turboquant4"):
            for left in (0xFF, 0x7C):
                made = made_impl(stored, kind=self.kind)
                step = Step(DECODES + CHUNKS + PROMPTS, torch.float32)
                expected = step.run(made, made_builder().build(0, step.common()))
                memory = made_memory(made).fill_(left)
                with mock.patch(f"{__name__}.made_memory", lambda *of: memory):
                    found = step.run(
                        made_impl(stored, kind=self.kind), made_builder().build(0, step.common())
                    )
                np.testing.assert_array_equal(found, expected)

    def test_memory(self):
        """Every layout that vLLM makes of LBHNC is used in place: padded pages, blocks of several
        pages. Copies are refused.
        """
        stored = chosen_as("int8")
        cell = codecs.cell_bytes(stored, DIM)
        for tokens, padding in ((64, 0), (64, 64), (64, 24576), (128, 0), (320, 0)):
            for dtype in (torch.float32, torch.bfloat16):
                spec = FullAttentionSpec(
                    block_size=tokens,
                    num_kv_heads=KV_HEADS,
                    head_size=DIM,
                    dtype=dtype,
                    state_content_bytes=cell,
                )
                spec = dataclasses.replace(
                    spec, page_size_padded=spec.page_size_bytes + padding if padding else None
                )
                raw = torch.zeros(2 * 5 * spec.page_size_bytes, dtype=torch.int8)
                placed = KVCacheTensor(
                    len(raw), ["a", "b"], 5 * spec.page_size_bytes, spec.page_size_bytes
                )
                for view in create_kv_cache_views(raw, spec, 5, KVCacheLayout.LBHNC, placed):
                    blocks = pages.rows_of_blocks(view)
                    self.assertEqual(len(blocks), 5 * tokens // 64)
                    at = [blocks[i : i + 1].ctypes.data for i in range(len(blocks))]
                    if tokens == 64:
                        self.assertEqual(at, [view[i].data_ptr() for i in range(5)])
                    else:
                        self.assertEqual(
                            at,
                            [
                                view.data_ptr() + i * spec.page_size_bytes // (tokens // 64)
                                for i in range(len(blocks))
                            ],
                        )
                    made = pages.LayerPages(stored, view, 0, range(KV_HEADS), DIM)
                    self.assertTrue(
                        made.k._memory.ctypes.data == view.data_ptr()
                        and np.shares_memory(made.v._memory, raw.numpy())
                    )
        wrong = torch.zeros(4, 64, KV_HEADS, cell, dtype=torch.uint8).transpose(1, 2)
        for memory in (
            wrong,
            torch.zeros(4, KV_HEADS, 32, cell, dtype=torch.uint8),
            torch.zeros(5, KV_HEADS, 64, 2 * cell, dtype=torch.uint8)[..., ::2],
        ):
            with self.assertRaisesRegex(ValueError, "kvant: .*(LBHNC|block-size)"):
                pages.LayerPages(stored, memory, 0, range(KV_HEADS), DIM)
        with self.assertRaisesRegex(ValueError, "too small"):
            pages.LayerPages(
                stored,
                torch.zeros(4, KV_HEADS, 64, cell - 4, dtype=torch.uint8),
                0,
                range(KV_HEADS),
                DIM,
            )


if __name__ == "__main__":
    unittest.main()
