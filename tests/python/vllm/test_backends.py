"""vLLM's backends without an engine: batches as vLLM describes them, compared with attention in
float64 over the rows that the codecs keep. The GPU's backend runs on a GPU, or on the mock
(tests/cuda/host) that KVANT_CUDA_LIBRARY names.
"""

import contextlib
import dataclasses
import os
import pathlib
import pickle
import subprocess
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
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers import rotary_embedding  # noqa: E402
from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    create_kv_cache_views,
)

import kvant  # noqa: E402
from kvant.vllm import batch, chosen, codecs, gpu, gpu_pages, impl, learn, pages  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KV_HEADS, GROUP, DIM, BLOCKS = 2, 4, 64, 40
HEADS = KV_HEADS * GROUP
# The sequences of one batch: each has a number of tokens, of which the last ones are queries.
DECODES = [(1, 1), (70, 1), (200, 1)]
DRAFTS = [(67, 4), (130, 2), (5, 5)]
CHUNKS = [(104, 40), (300, 110)]
PROMPTS = [(30, 30), (129, 129)]
LONG = [(500, 200), (329, 129)]  # their past is unpacked to rows


class CpuImpl(impl.Impl):
    Pages = pages.LayerPages


def made_impl(
    stored,
    calibration=None,
    window=None,
    softcap=None,
    sinks=None,
    rank=0,
    n_ranks=1,
    total=KV_HEADS,
    kind=gpu.Impl,
    dtype="auto",
    block_size=64,
    **others,
):
    model = types.SimpleNamespace(model=None, get_total_num_kv_heads=lambda: total)
    cache = types.SimpleNamespace(user_specified_block_size=True, block_size=block_size)
    layers = types.SimpleNamespace(static_forward_context={})
    config = types.SimpleNamespace(
        model_config=model, cache_config=cache, compilation_config=layers
    )
    environment = {"KVANT_VLLM": stored} | (
        {"KVANT_VLLM_CALIBRATION": str(calibration)} if calibration else {}
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict("os.environ", environment))
        stack.enter_context(mock.patch.object(impl, "get_current_vllm_config", lambda: config))
        stack.enter_context(mock.patch.object(impl, "get_tensor_model_parallel_rank", lambda: rank))
        stack.enter_context(
            mock.patch.object(impl, "get_tensor_model_parallel_world_size", lambda: n_ranks)
        )
        made = object.__new__(kind)
        made.__init__(
            HEADS, DIM, DIM**-0.5, KV_HEADS, None, window, dtype, softcap, sinks=sinks, **others
        )
    made.flash = None
    return made


def made_builder(drafts=0, spec=None):
    speculative = (
        types.SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False)
        if drafts
        else None
    )
    parallel = types.SimpleNamespace(decode_context_parallel_size=1)
    config = types.SimpleNamespace(
        speculative_config=speculative, parallel_config=parallel, use_v2_model_runner=True
    )
    return batch.Builder(spec, ["layer"], config, torch.device(DEVICE))


class Step:
    """A batch of sequences in blocks of any order. Tokens that are no queries were written
    before.
    """

    def __init__(self, sequences, dtype, layer=0):
        self.sequences, random = (
            sequences,
            torch.Generator().manual_seed(sum(n for n, _ in sequences)),
        )
        self.layer = types.SimpleNamespace(layer_name=f"model.layers.{layer}.attn")
        order = torch.randperm(BLOCKS - 1, generator=random) + 1
        most = max(-(-n // 64) for n, _ in sequences) + 1
        self.table, at = torch.zeros(len(sequences), most, dtype=torch.int32), 0
        self.rows = []
        for i, (n, _) in enumerate(sequences):
            blocks = -(-n // 64)
            self.table[i, :blocks] = order[at : at + blocks]
            at += blocks
            shape = n, KV_HEADS, DIM
            self.rows.append([(torch.randn(shape, generator=random) + 0.3).to(dtype) for _ in "kv"])
        counts = torch.tensor([0, *(m for _, m in sequences)])
        self.starts = counts.cumsum(0).to(torch.int32)
        self.queries = torch.randn(int(self.starts[-1]), HEADS, DIM, generator=random).to(dtype)

    def slots(self, i, first, last):
        tokens = torch.arange(first, last)
        return self.table[i].to(torch.int64)[tokens // 64] * 64 + tokens % 64

    def newest(self):
        """Keys, values and slots of the queries' tokens."""
        parts = [(n - m, n) for n, m in self.sequences]
        rows = [
            torch.cat([kv[role][a:b] for kv, (a, b) in zip(self.rows, parts)]) for role in (0, 1)
        ]
        return *rows, torch.cat([self.slots(i, *part) for i, part in enumerate(parts)])

    def common(self, **named):
        lengths = torch.tensor([n for n, _ in self.sequences], dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=self.starts.to(DEVICE),
            query_start_loc_cpu=self.starts,
            seq_lens=lengths.to(DEVICE),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(self.sequences),
            num_actual_tokens=int(self.starts[-1]),
            max_query_len=max(m for _, m in self.sequences),
            max_seq_len=int(lengths.max()),
            block_table_tensor=self.table.to(DEVICE),
            slot_mapping=self.newest()[2].to(DEVICE),
            **named,
        )

    def run(self, layer_impl, metadata):
        memory = made_memory(layer_impl)
        for i, (n, m) in enumerate(self.sequences):
            layer_impl.do_kv_cache_update(
                self.layer,
                *(x[: n - m].to(DEVICE) for x in self.rows[i]),
                memory,
                self.slots(i, 0, n - m).to(DEVICE),
            )
        k, v, slots = (x.to(DEVICE) for x in self.newest())
        padded = torch.cat([slots, slots.new_full((3,), -1)])  # vLLM pads batches like this
        more = [torch.cat([x, torch.full_like(x[:1], 7).expand(3, -1, -1)]) for x in (k, v)]
        layer_impl.do_kv_cache_update(self.layer, *more, memory, padded)
        out = torch.full_like(self.queries.to(DEVICE), float("nan")).reshape(len(self.queries), -1)
        layer_impl.forward(self.layer, self.queries.to(DEVICE), k, v, memory, metadata, out)
        return out.view(-1, HEADS, DIM).float().cpu().numpy()

    def expected(self, kept, **options):
        return np.concatenate(
            [
                attention(self.queries[self.starts[i] : self.starts[i + 1]], *kept(k, v), **options)
                for i, (k, v) in enumerate(self.rows)
            ]
        )


def made_memory(layer_impl):
    cell = codecs.cell_bytes(layer_impl.stored, DIM)
    return torch.zeros(BLOCKS, KV_HEADS, 64, cell, dtype=torch.uint8, device=DEVICE)


def attention(q, k, v, window=0, softcap=0.0, sinks=None, chunk=1 << 20):
    q, k, v = (
        np.asarray(x.float() if torch.is_tensor(x) else x, dtype=np.float64) for x in (q, k, v)
    )
    k, v = (np.repeat(x, GROUP, 1) for x in (k, v))
    scores = np.einsum("qhd,thd->hqt", q, k) * DIM**-0.5
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    at, token = np.arange(len(k) - len(q), len(k))[:, None], np.arange(len(k))
    seen = (token <= at) & (at - token < (window or len(k))) & (at // chunk == token // chunk)
    weights = np.where(seen, np.exp(scores), 0)
    total = weights.sum(-1) + (0 if sinks is None else np.exp(sinks)[:, None])
    return np.einsum("hqt,thd->qhd", weights / total[..., None], v)


def round_trip(layer_impl, layer=0):
    """Rows as the codecs of a layer keep them."""

    def kept(*rows):
        found = []
        for role, x in zip("kv", rows):
            pages = kvant.Tensor(
                codecs.codecs(layer_impl.stored, role, DIM, layer, layer_impl.heads),
                n_blocks=BLOCKS,
            )
            pages.write(np.arange(len(x)), x.float().numpy())
            found.append(pages.read(0, len(x)))
        return found

    return kept


def captured(run):
    """The test makes one run first, as vLLM does to warm up."""
    run()
    if DEVICE == "cpu":
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


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
        self, stored, sequences, dtype=torch.float32, drafts=0, layer=0, calibration=None, **options
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
            made, step = (
                made_impl(stored, kind=self.kind),
                Step(
                    [(300, 1), (256, 1), (257, 1), (250, 110), (200, 200), (128, 128)],
                    torch.float32,
                ),
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
            self.check(
                "balanced", DECODES + DRAFTS, torch.bfloat16, drafts=4, layer=1, calibration=path
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
        made, step = (
            made_impl("f32/f32", window=50),
            Step(DECODES + CHUNKS + PROMPTS, torch.float16),
        )
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

    def check_long(self, stored, dtype=torch.float16, window=0, flash=None, layer=0, **options):
        """For long parts, FlashAttention sees the past as the codecs keep it, and the part's own
        rows.
        """
        made, step = (
            made_impl(stored, window=window or None, **options),
            Step(DECODES + LONG + PROMPTS, dtype, layer),
        )
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
                made.do_kv_cache_update(first.layer, *static[:2], memory, static[2])
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
        with mock.patch(f"{__name__}.made_memory", lambda layer_impl: memory):
            found = step.run(made, made_builder().build(0, step.common()))
        self.close(found, step.expected(round_trip(made)), torch.float32, "int4")
        self.assertTrue(bool((whole[:, 0] == 0xA5).all()) and bool((whole[:, 2] == 0xA5).all()))

    def test_refusals(self):
        made, layer = made_impl("int4"), types.SimpleNamespace(layer_name="model.layers.0.attn")
        cell = codecs.cell_bytes(made.stored, DIM)
        rows, slots = (
            torch.zeros(1, KV_HEADS, DIM, device=DEVICE),
            torch.zeros(1, dtype=torch.int64, device=DEVICE),
        )
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
                        made, step = (
                            made_impl(stored, window=window, kind=self.kind),
                            Step(sequences, torch.float32),
                        )
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
        memory, good = made_memory(made), step.rows[1][0]
        for keys in (good.clone().index_fill_(0, torch.tensor([70]), np.nan), good):
            made.do_kv_cache_update(
                step.layer, keys, step.rows[1][1], memory, step.slots(1, 0, 129)
            )
            out = torch.zeros(len(step.queries), HEADS * DIM)
            made.forward(
                step.layer,
                step.queries,
                keys,
                step.rows[1][1],
                memory,
                made_builder().build(0, step.common()),
                out,
            )
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
                made, step = (
                    made_impl(stored, kind=self.kind),
                    Step(DECODES + CHUNKS + PROMPTS, torch.float32),
                )
                expected = step.run(made, made_builder().build(0, step.common()))
                memory = made_memory(made).fill_(left)
                with mock.patch(f"{__name__}.made_memory", lambda layer_impl: memory):
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


def chosen_as(name):
    with mock.patch.dict("os.environ", KVANT_VLLM=name):
        return chosen()


class Choices(TestCase):
    def test_cells_of_several_sizes(self):
        """The largest token is a whole multiple of every other token. If layers are 2^n times as
        wide as each other, padding makes up for unequal bytes per channel, and rounds up to 64
        bytes.
        """
        for name in ("int8", "int4", "turboquant4", "trellis3", "f32/f32"):
            stored = chosen_as(name)
            for shapes in (
                {(2, 64), (2, 128)},
                {(8, 256), (4, 512)},
                {(16, 256), (4, 512)},
                {(4, 80), (4, 128)},
                {(1, 256), (8, 128), (2, 64)},
            ):
                cells = codecs.even_cells(stored, shapes)
                tokens = {shape: shape[0] * cell for shape, cell in cells.items()}
                self.assertEqual({max(tokens.values()) % n for n in tokens.values()}, {0})
                for shape, cell in cells.items():
                    self.assertEqual(cell % codecs.CELL_ALIGN, 0)
                    self.assertGreaterEqual(cell, codecs.cell_bytes(stored, shape[1]))
                if (4, 80) not in shapes:
                    widest = max(heads * dim for heads, dim in shapes)
                    per_channel = max(codecs.cell_bytes(stored, dim) / dim for _, dim in shapes)
                    self.assertLess(max(tokens.values()), widest * per_channel + 64)
            self.assertEqual(
                codecs.even_cells(stored, {(2, 64)}), {(2, 64): codecs.cell_bytes(stored, 64)}
            )
        self.assertEqual(
            codecs.even_cells(chosen_as("turboquant4"), {(2, 64), (2, 128)}),
            {(2, 64): 68, (2, 128): 136},
        )

    def test_specs_that_are_refused(self):
        """kvant refuses blocks that hold anything else than a row of keys and of values per
        token.
        """
        shape = dict(block_size=64, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
        with (
            mock.patch.dict("os.environ", KVANT_VLLM="int8"),
            mock.patch.object(impl, "_stored", []),
        ):
            for spec in (
                FullAttentionSpec(**shape),
                SlidingWindowSpec(**shape, sliding_window=64),
                ChunkedLocalAttentionSpec(**shape, attention_chunk_size=64),
            ):
                self.assertEqual(impl.customize_spec(spec).state_content_bytes, 2 * 68)
            refused = (
                MLAAttentionSpec(**shape | {"num_kv_heads": 1}),
                CrossAttentionSpec(**shape),
                EncoderOnlyAttentionSpec(**shape),
            )
            refused += (
                SinkFullAttentionSpec(**shape, sink_len=4),
                FullAttentionSpec(**shape, head_size_v=128),
                FullAttentionSpec(**shape, tokens_per_state=2),
            )
            for spec in refused:
                with self.assertRaisesRegex(
                    NotImplementedError,
                    f"kvant: vLLM's {type(spec).__name__} .*start without KVANT_VLLM",
                ):
                    impl.customize_spec(spec)

    def test_options_of_layers(self):
        """Unknown words are refused, not ignored."""
        with self.assertRaisesRegex(
            NotImplementedError, "kvant: attention with dual_chunk_attention_config"
        ):
            made_impl("int8", dual_chunk_attention_config={"chunk_size": 8192})
        for dtype in ("fp8", "int8_per_token_head"):
            with self.assertRaisesRegex(
                ValueError,
                f"--kv-cache-dtype has to be kvant_NAME or auto with KVANT_VLLM, not {dtype}",
            ):
                made_impl("int8", dtype=dtype)
        with self.assertRaisesRegex(ValueError, "--block-size has to be a multiple of 64, not 16"):
            made_impl("int8", block_size=16)

    def test_vllm_clears_blocks_that_change_hands(self):
        """vLLM clears only kvant's blocks, where a refused row would leave another request's
        row.
        """
        kvant.vllm.register()
        kvant.vllm.register()
        plain = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
        packed = dataclasses.replace(plain, state_content_bytes=136)
        for spec, environment, needed in (
            (plain, "int8", False),
            (packed, "int8", True),
            (packed, "", False),
            (dataclasses.replace(packed, dtype=torch.uint8), "", True),
        ):
            with mock.patch.dict("os.environ", KVANT_VLLM=environment):
                found = KVCacheConfig(
                    num_blocks=4,
                    kv_cache_tensors=[],
                    kv_cache_groups=[KVCacheGroupSpec(["a"], spec)],
                )
                self.assertEqual(found.needs_kv_cache_zeroing, needed)

    def test_without_vllm(self):
        with (
            mock.patch("importlib.util.find_spec", lambda name: None),
            self.assertRaisesRegex(ImportError, "vLLM, which loads this plug-in"),
        ):
            kvant.vllm.register()

    def test_names_of_codecs(self):
        self.assertEqual(chosen_as("turboquant-4"), chosen_as("turboquant4"))
        self.assertEqual(chosen_as("trellis-3"), chosen_as("trellis3"))

    def test_parts(self):
        def parts(metadata):
            return [
                (p.first, p.last, p.first_row, p.last_row, p.most_queries, p.most_tokens, p.fresh)
                for p in metadata.parts
            ]

        step = Step(DECODES + CHUNKS + PROMPTS, torch.float32)
        both = [
            (0, 3, 0, 3, 1, 0, False),
            (3, 5, 3, 153, 110, 300, False),
            (5, 7, 153, 312, 129, 129, True),
        ]
        self.assertEqual(parts(made_builder().build(0, step.common())), both)
        self.assertEqual(
            parts(made_builder().build(0, Step(DECODES, torch.float32).common())),
            [(0, 3, 0, 3, 1, 0, False)],
        )
        drafts = Step(DRAFTS, torch.float32).common()
        self.assertEqual(parts(made_builder(4).build(0, drafts)), [(0, 3, 0, 11, 5, 0, False)])
        mixed = Step([PROMPTS[0], CHUNKS[0], PROMPTS[1]], torch.float32).common()
        self.assertEqual(
            [p.fresh for p in made_builder().build(0, mixed).parts], [True, False, True]
        )

    def test_lengths_that_the_host_does_not_know(self):
        """vLLM gives draft models one token more than the host's lengths say."""
        for known in (torch.tensor([129, 299]), None):
            late = Step([(130, 130), (300, 200)], torch.float32).common()
            late.seq_lens_cpu_upper_bound = known
            found = [
                (p.first_row, p.last_row, p.most_tokens, p.fresh, p.long)
                for p in made_builder().build(0, late).parts
            ]
            self.assertEqual(found, [(0, 130, 130, True, False), (130, 330, 300, False, True)])

    def test_dtypes(self):
        """The types kvant_NAME and kvant select kvant's blocks. Types of vLLM, such as auto, select
        them only if KVANT_VLLM is set.
        """
        with mock.patch.dict("os.environ", KVANT_VLLM=""):
            self.assertEqual(chosen("kvant_int4"), ("int-4", "int-4", None))
            self.assertIsNone(chosen("auto"))
            self.assertFalse(gpu.Backend.supports_kv_cache_dtype("auto"))
            for wrong in ("kvant_five", "kvant"):
                with self.assertRaisesRegex(ValueError, "none of turboquant4"):
                    chosen(wrong)
            with self.assertRaisesRegex(ValueError, "tiny learns a matrix .* no room for; small"):
                chosen("kvant_tiny")
        with mock.patch.dict("os.environ", KVANT_VLLM="int-8/int-4"):
            self.assertEqual(
                [chosen(name) for name in ("kvant", "auto", "fp8")],
                [("int-8", "int-4", None)] * 2 + [None],
            )
            self.assertEqual(
                [
                    gpu.Backend.supports_kv_cache_dtype(name)
                    for name in ("kvant", "bfloat16", "fp8")
                ],
                [True, True, False],
            )

    def test_a_rank_that_is_spawned_knows_the_backend(self):
        """A spawned rank reads its configuration before vLLM loads plug-ins in it."""
        kvant.vllm.register()
        words = [
            sys.executable,
            "-c",
            "import pickle, sys; print('NAME', pickle.load(sys.stdin.buffer).name)",
        ]
        found = os.pathsep.join([*(path for path in sys.path if path)])
        for name in ("KVANT", "FLASH_ATTN"):
            pickled = pickle.dumps(AttentionBackendEnum[name])
            done = subprocess.run(
                words, input=pickled, capture_output=True, env=os.environ | {"PYTHONPATH": found}
            )
            self.assertIn(f"NAME {name}", done.stdout.decode(), done.stderr.decode()[-500:])

    def test_calibration_beside_the_model(self):
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.dict("os.environ", KVANT_VLLM_CALIBRATION=""),
        ):
            with self.assertRaisesRegex(ValueError, "or kvant.kvcal beside the model"):
                chosen("kvant_balanced", folder)
            path = pathlib.Path(folder, "kvant.kvcal")
            path.touch()
            self.assertEqual(
                chosen("kvant_balanced", folder),
                ("trellis-4:transform=file,sink=0", "trellis-4", str(path)),
            )

    def test_drafts_have_no_calibration(self):
        made = made_impl("int4")
        memory = made_memory(made)
        made.stored = made.stored._replace(calibration="model.kvcal")
        mtp = types.SimpleNamespace(layer_name="mtp.layers.0.self_attn.attn")
        for layer in (
            mtp,
            types.SimpleNamespace(layer_name="draft_model.layers.0.attn"),
            types.SimpleNamespace(layer_name="layers.9.attn", is_draft_layer=True),
        ):
            with self.assertRaisesRegex(NotImplementedError, "of one model"):
                made._pages(layer, memory)

    def test_rows_turned_on(self):
        """RoPE in either order of channels, and with some channels that it does not rotate,
        compared with vLLM's own rows at later positions.
        """
        of_rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        rows, at = (
            torch.randn(20, 2, DIM, generator=torch.Generator().manual_seed(1)),
            torch.arange(20),
        )
        for neox in (True, False):
            with (
                mock.patch.dict(rotary_embedding._ROPE_DICT, clear=True),
                set_current_vllm_config(VllmConfig()),
            ):
                rope = rotary_embedding.get_rope(DIM, 512, neox, of_rope, dtype=torch.float32)
                now, later = (
                    rope.forward_native(x, rows.reshape(20, -1).clone(), None)[0].view(rows.shape)
                    for x in (at, at + 300)
                )
                turn = learn.Turn(DIM, 512)
            # three angles up to 320, each with an error of 2^-16 in float32, times numbers below
            # 2^2
            self.assertLess((turn(now, 300) - later).abs().max(), 3 * 2.0**-14)
            self.assertGreater((now - later).abs().max(), 1)
            with mock.patch.dict(rotary_embedding._ROPE_DICT, {1: rope, 2: rope}, clear=True):
                with self.assertRaisesRegex(NotImplementedError, "one RoPE"):
                    learn.Turn(DIM, 512)

    def test_heads_of_ranks(self):
        """Ranks hold parts of a model's kv heads, or copies if there are more ranks than heads."""
        self.assertEqual(
            [codecs.heads_of_rank(2, 8, r, 4) for r in range(4)],
            [range(0, 2), range(2, 4), range(4, 6), range(6, 8)],
        )
        self.assertEqual(
            [list(codecs.heads_of_rank(1, 2, r, 4)) for r in range(4)], [[0], [0], [1], [1]]
        )
        self.assertEqual(made_impl("int4", rank=3, n_ranks=4, total=8).heads, range(6, 8))


if __name__ == "__main__":
    unittest.main()
