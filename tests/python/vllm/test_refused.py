"""What kvant's plug-in for vLLM refuses at the start, without an engine: releases that were not
tested, features of vLLM that its attention does not know, and attention that computes something
else than it has to. test_vllm.py has models and options that an engine refuses.
"""

import dataclasses
import pathlib
import re
import sys
import tempfile
import types
import unittest
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "pytorch")]

import models  # noqa: E402
import torch  # noqa: E402
import vllm  # noqa: E402
from common import TestCase, np  # noqa: E402
from vllm.config import (  # noqa: E402
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

import kvant  # noqa: E402
from kvant.vllm import (  # noqa: E402
    gpu,
    gpu_pages,
    impl,
    learn,
    limits,
    pages,
    self_check,
    versions,
)
from steps import (  # noqa: E402
    DECODES,
    DEVICE,
    DIM,
    HEADS,
    KV_HEADS,
    LAYER,
    CpuImpl,
    Step,
    chosen_as,
    made_builder,
    made_impl,
    made_memory,
)

CONFIGS = {
    "model_config": ModelConfig,
    "parallel_config": ParallelConfig,
    "cache_config": CacheConfig,
    "kv_transfer_config": KVTransferConfig,
}


class Versions(TestCase):
    def test_releases(self):
        for version in ("0.32.0", "0.33.0", "0.33.1.dev7+g1234567"):
            self.assertIsNone(versions.refusal(version))
        for version in ("0.29.0", "0.34.0", "1.0", "0.3.3", "dev"):
            self.assertIn(f"vLLM {version} was not tested", versions.refusal(version))
        self.assertIsNone(versions.refusal(vllm.__version__))

    def test_another_release_is_refused_for_users_of_kvant(self):
        """Without kvant's settings the release works as if kvant were not installed."""
        with mock.patch.object(vllm, "__version__", "0.99.1"):
            with (
                mock.patch.dict("os.environ", KVANT_VLLM="turboquant4"),
                self.assertRaisesRegex(RuntimeError, "kvant: vLLM 0.99.1 was not tested, only 0.3"),
            ):
                kvant.vllm.register()
            with mock.patch.dict("os.environ", KVANT_VLLM=""):
                registry = f"{AttentionBackendEnum.__module__}.register_backend"
                with mock.patch(registry) as changed:
                    kvant.vllm.register()
                changed.assert_not_called()
            with self.assertRaisesRegex(RuntimeError, "0.99.1 was not tested"):
                versions.Backend
        with self.assertRaises(AttributeError):
            versions.Backend

    def test_the_name_of_the_backend_stays_known(self):
        names = {}
        registry = types.SimpleNamespace(register=names.setdefault)
        with mock.patch(f"{AttentionBackendEnum.__module__}.AttentionBackendEnum", registry):
            kvant.vllm._register_refusal()
        self.assertEqual(names, {"KVANT": "kvant.vllm.versions.Backend"})

    def test_every_release_was_run(self):
        text = (HERE.parents[2] / "bench" / "results" / "vllm_versions.csv").read_text()
        found = {".".join(line.split(",")[1].split(".")[:2]) for line in text.splitlines()[1:]}
        self.assertEqual(found, set(versions.TESTED))


class Limits(TestCase):
    def config(self, setting, value):
        part, name = setting.split(".")
        return types.SimpleNamespace(**{part: types.SimpleNamespace(**{name: value})})

    def test_features_that_are_refused(self):
        """Each value is refused with a line that says what to do."""
        wrong = {"kv_connector": "LMCacheConnectorV1", "rswa_window": 128}
        right = {"kv_connector": "DecodeBenchConnector"}
        for limit in limits.LIMITS:
            name = limit.setting.split(".")[1]
            value = wrong.get(name, 2 if limit.is_wrong is limits._several else True)
            with (
                self.subTest(limit.setting),
                self.assertRaisesRegex(NotImplementedError, "^kvant: .*(unset|need|be 1|start)"),
            ):
                limits.check(self.config(limit.setting, value))
            limits.check(self.config(limit.setting, right.get(name)))
        limits.check(types.SimpleNamespace())

    def test_vllm_has_these_settings(self):
        """A setting that this release does not have would be ignored. Older releases lack some."""
        for limit in limits.LIMITS:
            part, name = limit.setting.split(".")
            fields = {field.name for field in dataclasses.fields(CONFIGS[part])}
            missing = name not in fields and not hasattr(CONFIGS[part], name)
            self.assertFalse(missing, limit.setting)

    def test_layers_ask(self):
        found = types.SimpleNamespace(enable_dbo=True)
        with self.assertRaisesRegex(NotImplementedError, "dual-batch overlap was not tested"):
            made_impl("int8", settings={"parallel_config": found})

    def test_alibi(self):
        with self.assertRaisesRegex(NotImplementedError, "models with ALiBi .* start without"):
            CpuImpl(HEADS, DIM, DIM**-0.5, KV_HEADS, [0.5] * HEADS)

    def test_layers_that_vllm_keeps(self):
        config = self.config("cache_config.kv_cache_dtype_skip_layers", ["0"])
        with (
            mock.patch.dict("os.environ", KVANT_VLLM="int8"),
            self.assertRaisesRegex(NotImplementedError, "skip-layers leaves layers to vLLM"),
        ):
            limits.check(config)
        with mock.patch.dict("os.environ", KVANT_VLLM=""):
            limits.check(config)

    def test_learning_needs_the_whole_model(self):
        """A rank that has only some layers or heads would write a file that lacks the others."""
        for name in ("tensor", "pipeline"):
            sizes = types.SimpleNamespace(**{f"{name}_parallel_size": 2})
            with (
                mock.patch.dict("os.environ", KVANT_VLLM_LEARN="model.kvcal"),
                self.assertRaisesRegex(NotImplementedError, f"set --{name}-parallel-size 1"),
            ):
                made_impl("int8", settings={"parallel_config": sizes})


class Steps(TestCase):
    """A step of the engine refuses these, because its tokens would be wrong."""

    def test_quantised_outputs(self):
        made, step = made_impl("int8"), Step(DECODES, torch.float32)
        q = step.queries.to(DEVICE)
        for name in ("output_scale", "output_block_scale"):
            arguments = (step.layer, q, q, q, made_memory(made), object(), torch.zeros_like(q))
            with self.assertRaisesRegex(NotImplementedError, "quantised outputs are not .* start"):
                made.forward(*arguments, **{name: torch.ones(1)})

    def test_causal_attention_for_some_sequences(self):
        common = Step(DECODES, torch.float32).common()
        common.causal = torch.ones(len(DECODES), dtype=torch.bool)
        with self.assertRaisesRegex(NotImplementedError, "only some of the sequences .* start"):
            made_builder().build(0, common)

    def test_memory_that_pages_do_not_fit(self):
        """On a GPU an address that is no multiple of 16; on a CPU blocks that are too small."""
        made = made_impl("int8")
        memory = made_memory(made)
        shifted = torch.zeros(memory.numel() + 64, dtype=torch.uint8, device=DEVICE)[8:][
            : memory.numel()
        ].view(memory.shape)
        self.assertEqual(shifted.data_ptr() % 16, 8)
        arguments = (LAYER, range(KV_HEADS), DIM)
        with self.assertRaisesRegex(ValueError, "not aligned to 16 bytes"):
            gpu_pages.LayerPages(made.stored, shifted, *arguments)
        small = torch.zeros(4, KV_HEADS, 64, 64, dtype=torch.uint8)
        with self.assertRaisesRegex(ValueError, "blocks of .* bytes are too small for pages of"):
            pages.LayerPages(made.stored, small, *arguments)

    def test_a_library_without_code_for_the_gpu(self):
        found = types.SimpleNamespace(
            kvant_cuda_attention_workspace=lambda head_dim: 0, kvant_cuda_available=lambda *_: 0
        )
        with (
            mock.patch.object(gpu_pages, "library", lambda: found),
            mock.patch.object(gpu_pages, "_workspaces", {}),
            self.assertRaisesRegex(RuntimeError, "no code for this GPU: build kvant again"),
        ):
            gpu_pages.workspace(DIM, torch.device(DEVICE))

    def test_positions_that_the_model_does_not_have(self):
        """KVANT_VLLM_LEARN_POSITIONS rotates rows by the model's RoPE, so it needs exactly one."""
        from vllm.model_executor.layers import rotary_embedding

        rope = types.SimpleNamespace(
            head_size=DIM,
            cos_sin_cache=None,
            is_neox_style=True,
            _compute_cos_sin_cache=lambda: torch.ones(100, DIM),
        )
        for ropes, error, words in (
            ({}, NotImplementedError, "one RoPE for all layers: unset it"),
            ({1: rope, 2: rope}, NotImplementedError, "one RoPE for all layers: unset it"),
            ({1: rope}, ValueError, "the model has only 100 positions"),
        ):
            with (
                self.subTest(words, ropes=len(ropes)),
                mock.patch.object(rotary_embedding, "_ROPE_DICT", ropes),
                self.assertRaisesRegex(error, words),
            ):
                learn.Turn(DIM, 101)

    def test_names_that_are_unknown(self):
        for name in ("int5", "Balanced", "turboquant"):
            with self.assertRaisesRegex(ValueError, f"'{name}' is not one of turboquant4, .*, nor"):
                chosen_as(name)


class SelfCheck(TestCase):
    kinds = (gpu.Impl, CpuImpl) if not torch.cuda.is_available() else (gpu.Impl,)

    def setUp(self):
        self.enterContext(mock.patch.object(self_check, "_checked", set()))

    def check(self, stored, kind=gpu.Impl, dtype=torch.float32, layer=LAYER, **options):
        made = made_impl(stored, kind=kind, **options)
        with mock.patch.dict("os.environ", KVANT_VLLM_EXACT="1"):
            made.pool = made._made_pool(layer)  # without one, exact blocks are not checked
        self_check.check(made, layer, dtype, made._options(True))

    def test_right(self):
        sinks = torch.linspace(-2, 3, HEADS)
        for kind in self.kinds:
            for stored in ("f32/f32", "f16/f16", "int8", "int4", "turboquant4", "int-8/trellis-3"):
                with self.subTest(stored, kind=kind):
                    self_check._checked.clear()
                    self.check(stored, kind)
            for options in ({"window": 50}, {"softcap": 3.0}, {"sinks": sinks}):
                for dtype in (torch.bfloat16, torch.float16):
                    with self.subTest(**options, kind=kind, dtype=dtype):
                        self_check._checked.clear()
                        self.check("turboquant4", kind, dtype, **options)

    def test_calibrated(self):
        """Keys far from zero, as Qwen2.5 has them."""
        model = models.make("llama", head_dim=DIM)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "model.kvcal")
            random, made = np.random.default_rng(1), kvant.Calibrator(model="far")
            far = 100 * random.standard_normal((KV_HEADS, DIM))
            for role in "kv":
                rows = far * (role == "k") + random.standard_normal((512, KV_HEADS, DIM))
                for layer in range(LAYER + 1):
                    made.add_rows(layer, role, rows.astype(np.float32))
            for head in range(KV_HEADS):
                made.add_queries(LAYER, head, random.standard_normal((512, DIM)).astype(np.float32))
            made.finish().save(path)
            for kind in self.kinds:
                for dtype in (torch.float32, torch.bfloat16):
                    self_check._checked.clear()
                    self.check("balanced", kind, dtype, calibration=path)
            path = pathlib.Path(folder, "another.kvcal")
            kvant.calibrate(model, random.integers(3, 300, 512)).save(path)
            self_check._checked.clear()
            self.check("balanced", layer=1, calibration=path)

    def test_defaults_of_torch(self):
        """vLLM makes the model's type the default type of tensors while it loads weights. Numbers
        of a calibration stay float32, because the library writes and reads them as such. Another
        default device must not matter either."""
        self.addCleanup(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.bfloat16)
        for kind in self.kinds:
            for layer in (0, LAYER):
                self._check_preset(kind, layer)
                with torch.device("meta"):
                    self_check._checked.clear()
                    self.check("balanced", kind, torch.bfloat16, layer)

    def _check_preset(self, kind, layer):
        self_check._checked.clear()
        self.check("balanced", kind, torch.bfloat16, layer)
        made = made_impl("balanced", kind=kind)
        pages_of_layer = made._pages(Step(DECODES, torch.float32).layer, made_memory(made))
        if kind is gpu.Impl:
            numbers = pages_of_layer.k.numbers
            for x in (numbers.center, numbers.key_transform, numbers.inverse_key_transform):
                self.assertEqual(x.dtype, torch.float32)

    def test_wrong_attention(self):
        """Each of these would give wrong tokens without a word."""
        for kind in self.kinds:
            attend = kind.Pages.attend

            def swapped(pages, q, out, *rest):
                attend(pages, q, out, *rest)
                out[:] = out.flip(1)

            def rescaled(pages, q, out, batch, part, options):
                attend(pages, q, out, batch, part, dataclasses.replace(options, scale=0.1))

            def other_blocks(pages, q, out, batch, *rest):
                attend(
                    pages,
                    q,
                    out,
                    dataclasses.replace(batch, block_table=batch.block_table.flip(1)),
                    *rest,
                )

            def nothing(pages, q, out, *rest):
                out[:] = float("nan")

            for wrong in (swapped, rescaled, other_blocks, nothing):
                for stored in ("int8", "turboquant4"):
                    self_check._checked.clear()
                    with (
                        self.subTest(wrong.__name__, kind=kind, stored=stored),
                        mock.patch.object(kind.Pages, "attend", wrong),
                        self.assertRaisesRegex(RuntimeError, "pages is wrong by .* build kvant"),
                    ):
                        self.check(stored, kind)

    def test_a_codec_that_loses_rows(self):
        """A codec that keeps a constant part of each row alone, or rows of another token."""
        rows = np.random.default_rng(1).standard_normal((130, KV_HEADS, DIM))
        self_check._check_codec(chosen_as("turboquant4").of_layer(1), "k", DIM, rows, rows * 0.9)
        for after in (rows * 0.7, np.roll(rows, 1, 0), np.full_like(rows, np.nan)):
            with self.assertRaisesRegex(RuntimeError, "rows that turboquant-4 keeps are wrong"):
                self_check._check_codec(chosen_as("turboquant4").of_layer(1), "k", DIM, rows, after)

    def test_layers_of_one_shape_are_checked_once(self):
        self.check("int8")
        with mock.patch.object(gpu.Impl.Pages, "attend", side_effect=AssertionError):
            self.check("int8")
            with self.assertRaises(AssertionError):
                self.check("int4")

    def test_layers_are_checked_when_weights_are_loaded(self):
        made, layers = made_impl("int8"), {}
        layers["model.layers.3.attn"] = types.SimpleNamespace(impl=made)
        made.layers = layers
        with mock.patch.object(self_check, "check") as checked:
            made.process_weights_after_loading(torch.bfloat16)
            self.assertEqual(checked.call_args.args[:3], (made, 3, torch.bfloat16))
            made.kv_sharing_target_layer_name = "model.layers.1.attn"
            made.process_weights_after_loading(torch.bfloat16)
            self.assertEqual(checked.call_count, 1)
        self.assertIs(
            impl.Impl.process_weights_after_loading, CpuImpl.process_weights_after_loading
        )


class Page(TestCase):
    def test_tests_of_the_page_exist(self):
        """The page names a test for each feature of vLLM."""
        page = (HERE.parents[2] / "docs" / "reference" / "vllm.md").read_text()
        tests = "".join(path.read_text() for path in HERE.glob("test_*.py"))
        named = set(re.findall(r"`(test_\w+)`", page))
        self.assertGreater(len(named), 15)
        for name in named:
            self.assertIn(f"def {name}(", tests)


if __name__ == "__main__":
    unittest.main()
