"""kvant's blocks in a vLLM engine, compared with vLLM's own cache: a random model, and a process
for each engine. The test runs on a GPU if there is one, and otherwise on the CPU. Processes on the
CPU are forks of a process that has imported vLLM (engine.py).
"""

import contextlib
import importlib.util
import itertools
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "pytorch")]

import kinds  # noqa: E402
import models  # noqa: E402
import torch  # noqa: E402
from common import TestCase, np  # noqa: E402

import kvant  # noqa: E402
from kvant.vllm import chosen  # noqa: E402


def ids(n, seed):
    return [random.Random(seed * 1000 + i).randrange(3, 300) for i in range(n)]


ENGINE = [sys.executable, str(HERE / "engine.py")]
GPU = torch.cuda.is_available()
MOCK = (False,) if GPU else (False, True)  # whether the GPU's backend runs on the mock of a GPU
AT_START = ("PYTHONPATH", "TEST_LOGGING")  # variables that a process reads before it imports vLLM
CLOSE = (
    2.0**-5
)  # for log-probabilities in fp16, whose logits lie within 16: 4 units in their last place
DECIDED = (
    2.0**-7
)  # for log-probabilities in float32 on a CPU, where sums in another order move them by 1e-5
GREEDY = {"temperature": 0, "max_tokens": 12}
SHARED = ids(200, 1)  # three blocks and a part of one
ROUNDS = [
    ([ids(n, n) for n in (5, 64, 65, 300, 129)], GREEDY),  # lengths
    ([SHARED + ids(n, n) for n in (7, 60, 89)], GREEDY),  # a prefix that is not cached yet
    ([SHARED + ids(n, n) for n in (8, 33)], GREEDY),  # and a cached prefix
]
LEARNED_BYTES = "int-8:transform=file,sink=0/int-8"
CALIBRATED = "int-4:transform=file,sink=0/int-4:center=file,sink=0"
SAMPLES = ([ids(100, 3)], {"temperature": 0.8, "max_tokens": 8, "n": 3, "seed": 4})


def divergence(p, q):
    """The KLD of each row of log-probabilities."""
    return (np.exp(p) * (p - q)).sum(axis=1)


class Engine(TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.model = models.make("llama", head_dim=64)
        cls.model.save_pretrained(cls.folder.name)
        cls.at_start = {name: os.environ.get(name) for name in AT_START}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        cls.server = None if GPU else subprocess.Popen(ENGINE, text=True, **pipes)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()
        if cls.server:
            cls.server.communicate()

    def said_by_engine(self, arguments, environment):
        """The output of engine.py. A fork is enough if the variables at its start are the same."""
        if GPU or any(os.environ.get(name) != value for name, value in self.at_start.items()):
            words = [*ENGINE, *arguments]
            made = subprocess.run(words, env=environment, capture_output=True, text=True)
            return made.stdout + made.stderr
        with tempfile.NamedTemporaryFile("r", errors="replace") as out:
            job = {"arguments": arguments, "environment": environment, "out": out.name}
            print(json.dumps(job), file=self.server.stdin, flush=True)
            self.assertEqual(self.server.stdout.readline(), "DONE\n")
            return out.read()

    def run_engine(self, stored, rounds, folder=None, gpu=False, **options):
        """gpu: use the GPU's backend, on the mock of a GPU."""
        arguments = [folder or self.folder.name, json.dumps(options), json.dumps(rounds)]
        environment = {"KVANT_VLLM": stored, "TEST_GPU_PAGES": "1" if gpu else ""}
        self.said = self.said_by_engine(arguments, os.environ | environment)
        lines = [line for line in self.said.splitlines() if line.startswith("RESULT ")]
        if not lines:
            raise RuntimeError(self.said[-2000:])
        made = json.loads(lines[-1].removeprefix("RESULT "))
        for module in made["modules"]:  # none if other processes (ranks) have the layers
            self.assertEqual(module.startswith("kvant.vllm."), bool(stored), module)
        return made

    def run_stock(self, rounds, folder=None, **options):
        """The output with vLLM's own cache, with the log-probabilities that `same` and `decided`
        need.
        """
        return self.run_engine(
            "",
            [(prompts, sampling | {"logprobs": 2}) for prompts, sampling in rounds],
            folder,
            **options,
        )

    def decided(self, gaps):
        """No greedy token is nearly a tie. In many runs of vLLM's own engine, a gap of 6e-4 was
        once reversed. The CPU compares token by token, so the answer must be unique. On a GPU,
        `same` looks at the gaps.
        """
        if not GPU:
            self.assertGreater(
                min(gap for r in gaps for x in r for one in x for gap in one), DECIDED
            )

    def same(self, ours, stock, close=CLOSE if GPU else 0):
        """Compares the tokens of the first round, or of all rounds. A GPU sums attention in another
        order. So where tokens first differ, the log-probabilities of the two most probable tokens
        must differ by less than `close`.
        """
        if not close:
            return self.assertEqual(
                [[x["ids"] for x in r] for r in ours["rounds"]],
                [[x["ids"] for x in r] for r in stock["rounds"]],
            )
        self.assertEqual([len(r) for r in ours["rounds"]], [len(r) for r in stock["rounds"]])
        for mine, its, gaps in zip(ours["rounds"], stock["rounds"], stock["gaps"]):
            for x, y, [gap] in zip(mine, its, gaps):
                [x], [y] = x["ids"], y["ids"]
                self.assertEqual(len(x), len(y))
                n = next((i for i in range(len(x)) if x[i] != y[i]), None)
                self.assertLess(0 if n is None else gap[n], close, (n, x, y))
        return None

    def test_an_exact_codec_gives_the_stock_cache_s_ids(self):
        rounds = ROUNDS if GPU else [*ROUNDS, SAMPLES]
        stock = self.run_stock(rounds, max_num_seqs=4)
        self.decided(stock["gaps"][: len(ROUNDS)])
        for gpu in MOCK:
            ours = self.run_engine("f32/f32", rounds, gpu=gpu, max_num_seqs=4)
            self.same(ours, stock)
            self.assertEqual(
                [[x["cached"] for x in r] for r in ours["rounds"]],
                [[x["cached"] for x in r] for r in stock["rounds"]],
            )
            self.assertEqual(
                [x["cached"] for x in ours["rounds"][2]], [192, 192]
            )  # whole blocks of the prefix

    def test_chunks_and_preemption(self):
        """Few blocks, so that requests are preempted and begin again, and prompts in parts of 48
        tokens.
        """
        few = dict(max_num_seqs=4, max_num_batched_tokens=48, num_gpu_blocks_override=18)
        rounds = [([ids(n, n) for n in (250, 251, 252, 253)], {"temperature": 0, "max_tokens": 70})]
        stock = self.run_stock(rounds)
        self.decided(stock["gaps"])
        for gpu in MOCK:
            self.same(self.run_engine("f32/f32", rounds, gpu=gpu, **few), stock)

    def test_exact_blocks(self):
        """Exact blocks with prefixes, preemption, prompts in parts, and drafts of n-grams. On the
        mock few blocks are exact: pages of fp16 hold the same numbers, so tokens equal those of
        such pages alone. Kernels seal no fp16, so on a GPU all blocks are exact, and tokens are
        compared with those of vLLM's own cache.
        """
        few = dict(max_num_seqs=4, max_num_batched_tokens=48, num_gpu_blocks_override=18)
        long = [([ids(n, n) for n in (250, 251, 252, 253)], {"temperature": 0, "max_tokens": 70})]
        again = [([6 * ids(20, 1), 3 * ids(50, 2)], {"temperature": 0, "max_tokens": 150})]
        drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
        ngrams = dict(max_num_seqs=4, speculative_config=drafts)
        for rounds, options in ((ROUNDS, {"max_num_seqs": 4}), (long, few), (again, ngrams)):
            with_gaps = [(prompts, sampling | {"logprobs": 2}) for prompts, sampling in rounds]
            alone = self.run_engine(
                "" if GPU else "f16/f16", with_gaps, gpu=not GPU, max_num_seqs=4
            )
            with mock.patch.dict(os.environ, TEST_EXACT="all" if GPU else "few"):
                stored = "int-8/int-8" if GPU else "f16/f16"
                ours = self.run_engine(stored, rounds, gpu=not GPU, **options)
            self.same(ours, alone)
            self.assertGreater(ours["exact"]["exact"], 10)
            for count, least in (("sealed", 10), ("listed", 64)):
                self.assertGreater(ours["exact"][count], -1 if GPU else least)

    def check_drafts(self, draft, places):
        """Runs an engine with a draft model for each of `places` and checks its tokens. Yields how
        many draft tokens were made, and how many were accepted.
        """
        rounds = [([ids(n, n) for n in (100, 129, 7)], {"temperature": 0, "max_tokens": 40})]
        stock = self.run_stock(rounds, max_num_seqs=4)
        for gpu in places:
            drafts = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
            options = dict(max_num_seqs=4, speculative_config=drafts, disable_log_stats=False)
            ours = self.run_engine("f32/f32", rounds, gpu=gpu, **options)
            self.same(ours, stock)
            made, right = (
                ours["counts"][f"vllm:spec_decode_num_{name}_tokens"]
                for name in ("draft", "accepted")
            )
            self.assertGreater(made, 80)
            yield made, right

    def test_drafts_of_the_model_itself(self):
        for made, right in self.check_drafts(self.folder.name, MOCK):
            self.assertGreaterEqual(right, 0.95 * made if GPU else made)

    def test_drafts_of_another_model(self):
        with tempfile.TemporaryDirectory() as other:
            models.make("llama", head_dim=64, seed=1).save_pretrained(other)
            for made, right in self.check_drafts(other, (False,)):
                self.assertLess(right, made / 2)

    def test_mtp(self):
        """A head of the model drafts one token (Ernie 4.5)."""
        rounds = [([ids(n, n) for n in (100, 129, 7)], {"temperature": 0, "max_tokens": 40})]
        with tempfile.TemporaryDirectory() as folder:
            kinds.save("Ernie4_5_MoeConfig", folder)
            kinds.save_mtp_head(folder)
            stock = self.run_stock(rounds, folder, max_num_seqs=4)
            drafts = {"method": "mtp", "num_speculative_tokens": 1}
            options = dict(max_num_seqs=4, speculative_config=drafts, disable_log_stats=False)
            ours = self.run_engine("f32/f32", rounds, folder, **options)
        self.same(ours, stock)
        self.assertGreater(ours["counts"]["vllm:spec_decode_num_draft_tokens"], 60)

    def test_adapters(self):
        """LoRA changes keys and values, so requests with an adapter and without one share no
        blocks.
        """
        with tempfile.TemporaryDirectory() as folder:
            kinds.save_adapter(folder, self.model)
            prompts = [SHARED + ids(n, n) for n in (7, 60)]
            plain, adapted = (prompts, GREEDY), (prompts, GREEDY | {"adapter": folder})
            rounds = [plain, adapted, plain, adapted]
            options = dict(max_num_seqs=4, enable_lora=True, max_lora_rank=8)
            stock = self.run_stock(rounds, **options)
            ours = self.run_engine("f32/f32", rounds, **options)
        self.same(ours, stock)
        answers = [[x["ids"] for x in r] for r in ours["rounds"]]
        self.assertEqual((answers[0], answers[1]), (answers[2], answers[3]))
        self.assertNotEqual(answers[0], answers[1])

    @unittest.skipIf(importlib.util.find_spec("numba") is None, "vLLM's n-grams need numba")
    def test_ngrams(self):
        """Drafts from the prompt."""
        rounds = [([6 * ids(20, 1), 3 * ids(50, 2)], {"temperature": 0, "max_tokens": 60})]
        stock = self.run_stock(rounds, max_num_seqs=4)
        drafts = {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
        ours = self.run_engine(
            "f32/f32", rounds, max_num_seqs=4, speculative_config=drafts, disable_log_stats=False
        )
        self.same(ours, stock)
        self.assertGreater(ours["counts"]["vllm:spec_decode_num_draft_tokens"], 20)

    def check_kind(self, kind, **options):
        options["max_num_seqs"] = 4
        with tempfile.TemporaryDirectory() as folder:
            models.make(kind, head_dim=64).save_pretrained(folder)
            self.same(
                self.run_engine("f32/f32", ROUNDS[:2], folder, **options),
                self.run_stock(ROUNDS[:2], folder, **options),
            )

    def test_windows(self):
        self.check_kind("mistral")

    def test_sinks(self):
        self.check_kind("gpt_oss", **({"dtype": "bfloat16"} if GPU else {}))

    def test_windows_and_softcap(self):
        """vLLM refuses Gemma 2 in fp16. The model's logits lie within 2, so CLOSE is four units of
        bf16, too.
        """
        self.check_kind("gemma2", **({"dtype": "bfloat16"} if GPU else {}))

    def check_blocks_of_several_kinds(self, kind, stored, places=(False,), **options):
        """Greedy tokens equal the stock cache's, with prefix hits and with blocks that move between
        layers.
        """
        rounds = [([ids(n, n) for n in (5, 65, 150)], GREEDY)] + [
            ([SHARED + ids(n, n) for n in (7, 89)], GREEDY)
        ] * 2
        rounded = GPU or kind == "Qwen3NextConfig"  # on CPUs, vLLM runs it only in bfloat16
        of_engine = {"max_num_seqs": 4} | ({"dtype": "bfloat16"} if rounded else {})
        with tempfile.TemporaryDirectory() as folder:
            kinds.save(kind, folder, **options)
            stock = self.run_stock(rounds, folder, **of_engine)
            for one, gpu in itertools.product(stored, places):
                with self.subTest(one, gpu=gpu):
                    self.same(
                        self.run_engine(one, rounds, folder, gpu=gpu, **of_engine),
                        stock,
                        CLOSE if rounded else DECIDED,
                    )

    def test_recurrent_layers(self):
        """Qwen3-Next: vLLM gives a block's memory to attention and, at other times, to recurrent
        layers.
        """
        self.check_blocks_of_several_kinds("Qwen3NextConfig", ["f32/f32"])

    @unittest.skipIf(GPU, "test_recurrent_layers is on the GPU")
    def test_recurrent_layers_beside_a_gpu_s_pages(self):
        self.check_blocks_of_several_kinds("Qwen3NextConfig", ["f32/f32"], [True])

    def test_short_convolutions(self):
        """The recurrent layers of LFM2. (Mamba 2 does not run in vLLM's CPU build without
        Triton.)
        """
        self.check_blocks_of_several_kinds("Lfm2Config", ["f32/f32"])

    def test_layers_that_share_keys(self):
        layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        self.check_blocks_of_several_kinds(
            "Gemma4TextConfig",
            ["f32/f32"],
            layer_types=layers,
            num_kv_shared_layers=3,
            num_hidden_layers=6,
        )

    def test_two_head_dims(self):
        """Cells of two sizes are padded to a whole ratio, and as many blocks fit as these bytes
        allow. Blocks lie in vLLM's memory, otherwise the engine does not start.
        """
        self.check_blocks_of_several_kinds("Gemma4TextConfig", ["f32/f32"])
        with tempfile.TemporaryDirectory() as folder:
            kinds.save("Gemma4TextConfig", folder)
            blocks = [
                self.run_engine(stored, [], folder, dtype="bfloat16")["blocks"]
                for stored in ("", "int8", "turboquant4")
            ]
        for fit, cell in zip(
            blocks[1:], (136, 68)
        ):  # bytes of a window's token and kv head; bfloat16: 256
            self.assertAlmostEqual(fit / blocks[0], 256 / cell, delta=2 / blocks[0])

    @contextlib.contextmanager
    def plug_in(self):
        """kvant's entry point, by which ranks in other processes load the plug-in."""
        with tempfile.TemporaryDirectory() as folder:
            entry = pathlib.Path(folder, "kvant-0.dist-info")
            entry.mkdir()
            (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: kvant\nVersion: 0\n")
            (entry / "entry_points.txt").write_text(
                "[vllm.general_plugins]\nkvant = kvant.vllm:register\n"
            )
            found = (
                folder,
                str(HERE.parents[2] / "integrations" / "python"),
                os.environ.get("PYTHONPATH", ""),
            )
            with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(found)):
                yield

    @unittest.skipIf(GPU and torch.cuda.device_count() < 2, "needs two GPUs")
    def test_tensor_parallelism(self):
        """Two ranks, which load the plug-in by its entry point: each holds and calibrates one of
        the two kv heads. The test uses float32, where sums in another order hardly change a code.
        """
        rounds, path = ROUNDS[:2], pathlib.Path(self.folder.name, "model.kvcal")
        options = dict(max_num_seqs=4, dtype="float32")
        stock = self.run_stock(
            rounds, **options, **({"attention_backend": "TRITON_ATTN"} if GPU else {})
        )
        kvant.calibrate(self.model, np.array(ids(2048, 9))).save(path)
        with self.plug_in(), mock.patch.dict(os.environ, KVANT_VLLM_CALIBRATION=str(path)):
            two = [
                self.run_engine(stored, rounds, tensor_parallel_size=2, **options)
                for stored in ("f32/f32", CALIBRATED)
            ]
            one = self.run_engine(CALIBRATED, rounds, **options)
        self.same(two[0], stock)
        pairs = [
            (x["ids"], y["ids"])
            for mine, its in zip(two[1]["rounds"], one["rounds"])
            for x, y in zip(mine, its)
        ]
        self.assertGreaterEqual(sum(x == y for x, y in pairs), 6)  # of 8
        self.assertIn(
            two[1]["blocks"], (2 * one["blocks"], 2 * one["blocks"] + 1)
        )  # the cache has half the bytes

    def test_codes(self):
        """How many blocks fit, and ids that do not depend on which blocks are cached or preempted.
        (On a GPU, whole prompts see their own rows, parts of prompts see the codecs' rows of the
        past.)
        """
        rounds, stock = ROUNDS, self.run_engine("", [])
        plenty = self.run_engine("turboquant4", [] if GPU else rounds, max_num_seqs=4)
        # 68 bytes per token and kv head, and 102 in the first of the model's four layers
        of_stock = 256 if GPU else 512
        self.assertGreater(plenty["blocks"], 0.98 * of_stock * 4 / (3 * 68 + 102) * stock["blocks"])
        if GPU:
            return
        few = self.run_engine(
            "turboquant4",
            rounds,
            max_num_seqs=4,
            max_num_batched_tokens=48,
            num_gpu_blocks_override=18,
        )
        self.assertEqual(
            [[x["ids"] for x in r] for r in few["rounds"]],
            [[x["ids"] for x in r] for r in plenty["rounds"]],
        )

    def test_calibrated(self):
        """Most first tokens equal the stock cache's. With rows of another layer hardly any would,
        because there are 300 tokens to choose from.
        """
        path = pathlib.Path(self.folder.name, "model.kvcal")
        kvant.calibrate(self.model, np.array(ids(2048, 9))).save(path)
        with mock.patch.dict(os.environ, KVANT_VLLM_CALIBRATION=str(path)):
            with mock.patch.dict(os.environ, KVANT_VLLM="balanced"):
                self.assertEqual(
                    chosen()[:3], ("trellis-4:transform=file,sink=0", "trellis-4", str(path))
                )
            ours = self.run_engine(
                "int-8:transform=file,sink=0/int-8:center=file,sink=0", ROUNDS[:1]
            )["rounds"][0]
        stock = self.run_stock(ROUNDS[:1])["rounds"][0]
        self.assertGreaterEqual(
            sum(a["ids"][0][0] == b["ids"][0][0] for a, b in zip(ours, stock)), 4
        )

    def check_learning(self, expected_positions=0, **environment):
        """An engine learns from its prompts the same numbers that kvant.calibrate finds in the same
        texts.
        """
        text = np.array(ids(10000, 4))
        rounds = [
            ([part.tolist()], {"temperature": 0, "max_tokens": 1})
            for part in text.reshape(10, 1000)
        ]
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/learned.kvcal"
            with mock.patch.dict(os.environ, environment, KVANT_VLLM_LEARN=path):
                self.run_engine("f32/f32", rounds, max_num_seqs=1, max_num_batched_tokens=1024)
            found = kvant.Calibration(path)
        expected = kvant.calibrate(
            self.model, text[:9000], context=1000, n_tokens=9000, positions=expected_positions
        )  # learning ended with 8192 of these tokens
        self.assertEqual(found.info[2:8], expected.info[2:8])
        rounded = 2.0**-7 if GPU else 2.0**-9  # the model is fp16, and so are matrices
        for layer in range(found.info.n_layers):
            for head in range(found.info.n_kv_heads):
                for role in "kv":
                    for x, y in zip(
                        found.entry(layer, head, role), expected.entry(layer, head, role)
                    ):
                        if isinstance(y, np.ndarray):
                            self.assertLess(np.abs(x - y).max(), rounded * np.abs(y).max())

    def first_tokens(self, made):
        """The log-probabilities of all tokens after the prompts of the last two rounds."""
        return np.array([one for of_round in made["first"][2:] for one in of_round])

    def test_a_preset_that_learns_while_it_serves(self):
        """A prefix is stored before transforms are learned and read after they are. With keys of 8
        bits the KLD to the stock cache is 0.04 at most. Without the prefix's second encoding it is
        0.26 or more. Codes of 4 bits move the answers of this random model too far for such a
        comparison (a KLD of 0.6 on average). So they only have to be closer to the stock cache's
        answer than the answers to other prompts, whose KLD is 4 to 6. A GPU encodes all blocks
        again, which the mock does slowly, so there are few.
        """
        first, texts = ([SHARED + ids(60, 60)], GREEDY), [ids(900, n) for n in range(3)]
        rounds = [first, (texts, {"temperature": 0, "max_tokens": 2}), ROUNDS[2], ROUNDS[0]]
        rounds = [(prompts, sampling | {"logprobs": 300}) for prompts, sampling in rounds]
        options = dict(max_num_seqs=1, num_gpu_blocks_override=72, max_logprobs=300)
        stock = self.run_engine("", rounds, **options)
        expected = self.first_tokens(stock)
        others = min(
            divergence(expected, np.roll(expected, i, axis=0)).mean()
            for i in range(1, len(expected))
        )
        for name, gpu in itertools.product((LEARNED_BYTES, "balanced", "fast"), MOCK):
            with self.subTest(name, gpu=gpu), mock.patch.dict(os.environ, TEST_LOGGING="INFO"):
                ours = self.run_engine(name, rounds, gpu=gpu, **options)
                self.assertIn("kvant: learned transforms from 2", self.said)
                self.assertEqual([x["cached"] for x in ours["rounds"][2]], [192, 192])
                found = divergence(expected, self.first_tokens(ours))
                if name == LEARNED_BYTES:
                    self.assertLess(found.max(), 0.1)
                self.assertLess(found.mean(), others / 3)

    def test_learning(self):
        self.check_learning()

    def test_learning_at_later_positions(self):
        """Prompt i begins at position 125 i in the engine and in kvant.calibrate. The engine
        spreads 8192 tokens over 1024 positions, which is 1024 * 1000 i / 8192. The calibration
        spreads nine contexts over 1000 positions, which is 1000 i / 8.
        """
        self.check_learning(2000, KVANT_VLLM_LEARN_POSITIONS="2024")

    def test_models_that_are_refused(self):
        refused = (
            ("DeepseekV3Config", {}, "latent attention"),
            ("BertConfig", {"runner": "pooling"}, "encoders"),
        )
        for kind, options, words in refused:
            with self.subTest(kind), tempfile.TemporaryDirectory() as folder:
                kinds.save(kind, folder)
                with self.assertRaisesRegex(
                    RuntimeError, f"kvant: .*{words}.*start without KVANT_VLLM"
                ):
                    self.run_engine("int8", [], folder, **options)

    @unittest.skipIf(GPU, "dtypes of a GPU name kvant")
    def test_options_that_are_refused(self):
        for options, words in (
            ({"kv_cache_dtype": "fp8"}, "kv-cache-dtype has to be"),
            ({"block_size": 16}, "multiple of 64, not 16"),
        ):
            with self.subTest(options), self.assertRaisesRegex(RuntimeError, f"kvant: .*{words}"):
                self.run_engine("int8", [], **options)

    def test_one_line_says_that_blocks_are_kvant_s(self):
        with mock.patch.dict(os.environ, TEST_LOGGING="INFO"):
            self.run_engine("turboquant-4", [])
        [line] = [line for line in self.said.splitlines() if "kvant: blocks" in line]
        self.assertIn(
            "blocks hold keys as turboquant-4 (int-8 in the first layer), values as turboquant-4: "
            "4.25 bits per number at head_dim 64",
            line,
        )

    def test_wrong_attention_is_refused(self):
        """The engine compares attention with float64 before it serves."""
        with mock.patch.dict(os.environ, TEST_WRONG_ATTENTION="1"):
            for gpu in MOCK:
                with self.assertRaisesRegex(RuntimeError, "kvant: attention over .* is wrong by"):
                    self.run_engine("turboquant4", [], gpu=gpu)

    def test_refusals(self):
        wrong = (("nothing", "one of turboquant4"), ("kivi-2/kivi-2", "rows outside of its pages"))
        for stored, words in wrong:
            with self.subTest(stored), self.assertRaisesRegex(RuntimeError, words):
                self.run_engine(stored, [])


if __name__ == "__main__":
    unittest.main()
