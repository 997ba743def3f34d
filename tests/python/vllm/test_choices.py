"""Choices of kvant's backends for vLLM, without an engine: codecs and cells of layers, heads of
ranks, calibrations, refusals. test_backends.py tests the numbers that the backends compute.
"""

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

import torch  # noqa: E402
from common import TestCase  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers import rotary_embedding  # noqa: E402
from vllm.model_executor.layers.attention import Attention  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

import kvant  # noqa: E402
from kvant.vllm import Stored, chosen, codecs, gpu, impl, learn  # noqa: E402
from steps import (  # noqa: E402
    CHUNKS,
    DECODES,
    DIM,
    DRAFTS,
    PROMPTS,
    Step,
    chosen_as,
    made_builder,
    made_impl,
    made_memory,
)


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

    def test_codecs_that_fail_on_outliers_warn(self):
        for name, warns in (
            ("int4", True),
            ("bdr4", True),
            ("turboquant4", False),
            ("int8", False),
        ):
            impl._say.cache_clear()
            with self.assertLogs("vllm.kvant", "INFO") as said:
                impl._say(chosen_as(name), 64, 68)
            self.assertEqual("fails on models whose keys have outliers" in said.output[-1], warns)

    def test_the_first_layer_s_keys(self):
        """Its blocks are larger if all layers are plain attention. vLLM pads blocks of other models
        to equal bytes, so all their layers have the same codecs.
        """
        spec = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
        plain, window = (object.__new__(Attention) for _ in range(2))
        plain.__dict__["impl"] = made_impl("turboquant4")
        window.__dict__["impl"] = made_impl("turboquant4", window=50)
        first = impl._backend_of_layer(gpu.Backend, 0)
        for layers, cells in (({"a": plain}, (102, 68)), ({"a": plain, "b": window}, (68, 68))):
            with mock.patch.object(impl, "_stored", [(chosen_as("turboquant4"), layers)]):
                found = [of.customize_spec(spec).state_content_bytes for of in (first, gpu.Backend)]
            self.assertEqual(found, [-(-cell // 4) * 4 for cell in cells])
        self.assertEqual(first.full_cls_name(), gpu.Backend.full_cls_name())

    def test_only_the_first_layer_has_another_backend(self):
        for number, stored, changed in (
            (0, "turboquant4", True),
            (1, "turboquant4", False),
            (0, "int4", False),
        ):
            made = made_impl(stored)
            layer = types.SimpleNamespace(impl=made, attn_backend=gpu.Backend)
            made.layers = {f"model.layers.{number}.attn": layer}
            made.process_weights_after_loading(torch.bfloat16)
            self.assertEqual(layer.attn_backend is not gpu.Backend, changed)

    def test_presets_of_models_with_several_kinds_of_layers(self):
        """Memory of a window's layer may belong to another layer, so its rows cannot be encoded
        again, and learning needs a file.
        """
        spec = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
        layer = object.__new__(Attention)
        layer.__dict__["impl"] = made_impl("balanced", window=50)
        with (
            mock.patch.object(impl, "_stored", [(chosen_as("balanced"), {"a": layer})]),
            self.assertRaisesRegex(
                ValueError, "transforms need a calibration if layers have windows"
            ),
        ):
            impl.customize_spec(spec)

    def test_learners(self):
        """Codecs that need a calibration learn one for themselves if there is no file.
        KVANT_VLLM_LEARN makes a file.
        """
        with mock.patch.object(learn, "learners", []):
            self.assertEqual(len(made_impl("balanced").learners), 1)
            self.assertEqual(len(made_impl("balanced").learners), 1)  # of the whole model
        for stored in ("fast", "turboquant-4:transform=file,sink=0/turboquant-4"):
            with mock.patch.object(learn, "learners", []):
                self.assertEqual(len(made_impl(stored).learners), 1)
        with mock.patch.object(learn, "learners", []):
            self.assertEqual(made_impl("turboquant4").learners, [])
            with mock.patch.dict("os.environ", KVANT_VLLM_LEARN="model.kvcal"):
                self.assertEqual(len(made_impl("balanced").learners), 2)

    def test_learners_of_a_second_model(self):
        """A model does not get transforms that another model of the process has learned."""
        of_layers = {"compilation_config": types.SimpleNamespace(static_forward_context={})}
        with (
            mock.patch.object(learn, "learners", []),
            mock.patch.object(codecs.learned, "calibration", None),
        ):
            first = made_impl("balanced", settings=of_layers)
            codecs.learned.calibration = codecs.identity(DIM)
            self.assertIs(made_impl("balanced", settings=of_layers).learners, first.learners)
            self.assertIsNotNone(codecs.learned.calibration)
            second = made_impl("balanced")
            self.assertIsNot(second.learners[0], first.learners[0])
            self.assertIsNone(codecs.learned.calibration)

    def test_prompts_of_nan(self):
        """A prompt that the model cannot compute ends neither the engine nor learning."""
        used, rows = [], torch.randn(100, 2, DIM)
        learner = learn.Learner("model", 150, used.append)
        for place in range(3):
            for number in (torch.nan, torch.inf):
                spoiled = [rows, rows, rows]
                spoiled[place] = rows.clone()
                spoiled[place][50, 1, 3] = number
                learner.see(0, *spoiled, 0.1, 0, 0.0)
        learner.between_steps()
        self.assertEqual((used, learner._seen[0]), ([], 0))
        for _ in range(2):
            learner.see(0, rows, rows, rows, 0.1, 0, 0.0)
        learner.between_steps()
        self.assertEqual((len(used), used[0].info.n_tokens), (1, 200))

    def test_learning_ends_between_steps(self):
        """All layers have then seen the same prompts, and no step is disturbed."""
        used, rows = [], torch.randn(100, 2, DIM)
        learner = learn.Learner("model", 150, used.append)
        with mock.patch.object(learn, "learners", [learner]):
            for n in (1, 2, 3):
                for layer in (0, 1):
                    learner.see(layer, rows, rows, rows, 0.1, 0, 0.0)
                self.assertEqual(used, [])
                if n < 3:
                    made_builder().build(0, Step(DECODES, torch.float32).common())
                    self.assertEqual(len(used), n - 1)
                    used.clear()
            self.assertEqual(learner._seen[1], 200)
        self.assertTrue(learner.done)

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
            self.assertEqual(chosen("kvant_int4"), Stored("int-4", "int-4"))
            self.assertIsNone(chosen("auto"))
            self.assertFalse(gpu.Backend.supports_kv_cache_dtype("auto"))
            self.assertEqual(chosen("kvant"), chosen("kvant_balanced"))
            with self.assertRaisesRegex(ValueError, "one of turboquant4"):
                chosen("kvant_five")
            with self.assertRaisesRegex(ValueError, "tiny learns a matrix .* no room for; small"):
                chosen("kvant_tiny")
        with mock.patch.dict("os.environ", KVANT_VLLM="int-8/int-4"):
            self.assertEqual(
                [chosen(name) for name in ("kvant", "auto", "fp8")],
                [Stored("int-8", "int-4")] * 2 + [None],
            )
            self.assertEqual(
                [
                    gpu.Backend.supports_kv_cache_dtype(name)
                    for name in ("kvant", "bfloat16", "fp8")
                ],
                [True, True, False],
            )

    @unittest.skipUnless(hasattr(AttentionBackendEnum, "register"), "vLLM 0.31 has no such names")
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
            path = pathlib.Path(folder, "kvant.kvcal")
            named = {
                "kvant_balanced": ("trellis-4:transform=file,sink=0", "trellis-4"),
                "kvant_fast": ("turboquant-6:transform=file,sink=0", "turboquant-4"),
            }
            for name, specs in named.items():
                found = chosen(name, folder)
                self.assertEqual(found, Stored(*specs, first_k="int-8", learns=True))
            path.touch()
            for name, specs in named.items():
                self.assertEqual(chosen(name, folder), Stored(*specs, str(path)))

    def test_drafts_have_no_calibration(self):
        made = made_impl("int4")
        memory = made_memory(made)
        mtp = types.SimpleNamespace(layer_name="mtp.layers.0.self_attn.attn")
        for layer in (
            mtp,
            types.SimpleNamespace(layer_name="draft_model.layers.0.attn"),
            types.SimpleNamespace(layer_name="layers.9.attn", is_draft_layer=True),
        ):
            for needs in ({"calibration": "model.kvcal"}, {"learns": True}):
                made.stored = chosen_as("int4")._replace(**needs)
                made.layers = {layer.layer_name: layer}
                layer.impl = made
                with self.assertRaisesRegex(NotImplementedError, "belongs to one model"):
                    made.process_weights_after_loading(torch.bfloat16)
                with self.assertRaisesRegex(NotImplementedError, "belongs to one model"):
                    made._pages(layer, memory)

    def test_rows_turned_on(self):
        """RoPE in either order of channels, and with some channels that it does not rotate,
        compared with vLLM's own rows at later positions.
        """
        of_rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        rows = torch.randn(20, 2, DIM, generator=torch.Generator().manual_seed(1))
        at = torch.arange(20)
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
