#!/usr/bin/env python3
"""bench/rivals reads the logs and tables of other programs, and refuses what it cannot read."""

import argparse
import json
import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench" / "rivals"), str(ROOT / "bench")]

import tasks  # noqa: E402
from pieces import as_pieces, byte_characters, kept_merges, pieces_in  # noqa: E402
from quality import LogError, cache_mib, model_name, parse, ran_on_gpu  # noqa: E402
from speed import DEPTH, read_bench, read_sweep  # noqa: E402
from systems import SYSTEMS, System  # noqa: E402

NUMBERS = """
Mean PPL(Q)                   :  16.560670 ±   1.543209
Mean    KLD:   0.004360 ±   0.000208
99.9%   KLD:   0.092566
99.0%   KLD:   0.030058
Same top p: 97.361 ± 0.501 %
"""
LLAMA = """
llama_context: constructing llama_context
llama_kv_cache: size =    45.00 MiB (  2048 cells,  30 layers), K (f16):   22.50 MiB
llama_context: constructing llama_context
llama_kv_cache: size =    10.00 MiB (  2048 cells,  3 layers), K (q4_0):   5.00 MiB
llama_kv_cache: size =    2.50 MiB (  1024 cells,  15 layers), K (q4_0):   1.25 MiB
"""
FORK = "llama_init_from_model: KV self size  =   45.00 MiB, K (f16):   22.50 MiB"
KVANT = "kvant: KV cache balanced: 6.56 bits per number, 30 of 30 layers, 18.5 MiB for 2048 tokens"
NAMED = (
    "kvant: KV cache trellis-4:transform=first / trellis-3: 4.34 bits per number, 24 of 24 layers"
)


class Quality(unittest.TestCase):
    def test_memory_is_the_last_context(self):
        self.assertEqual(cache_mib(LLAMA), 12.5)
        self.assertEqual(cache_mib(FORK), 45)

    def test_numbers(self):
        row = parse(System("llama.cpp", "q4_0"), LLAMA + NUMBERS, 40.0)
        expected = {"bits": 5.0, "ppl": 16.56067, "kld_mean": 0.00436, "kld_se": 0.000208}
        self.assertEqual(row, {**expected, "kld_p99": 0.030058, "top1": 0.97361})

    def test_kvant_says_its_bits(self):
        self.assertEqual(parse(System("kvant", "balanced"), KVANT + NUMBERS, 45.0)["bits"], 6.56)
        self.assertEqual(parse(System("kvant", "named"), NAMED + NUMBERS, 45.0)["bits"], 4.34)

    def test_a_cache_on_a_gpu_is_told_from_one_in_system_memory(self):
        measured = "kvant: KVANT: 0 graphs in 0 parts, 0 captures, 0 launches\n"
        self.assertTrue(ran_on_gpu(measured + "kvant: KVANT: 64 graphs in 1984 parts\n"))
        self.assertFalse(ran_on_gpu(measured + KVANT))
        self.assertFalse(ran_on_gpu("using device KVANT (a cache in system memory)\n"))

    def test_names_of_models(self):
        for file, name in (
            ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M"),
            ("Qwen2.5-Coder-0.5B-20k-float.F16.gguf", "Qwen2.5-Coder-0.5B-20k-float"),
        ):
            self.assertEqual(model_name(pathlib.Path(file)), name)

    def test_a_log_without_a_number_is_refused(self):
        for text in (NUMBERS, LLAMA, LLAMA + NUMBERS.replace("Same top", "top")):
            with self.assertRaises(LogError):
                parse(System("llama.cpp", "q4_0"), text, 45.0)

    def test_names_are_unique_and_every_program_has_an_f16(self):
        names = [(system.program, system.cache) for system in SYSTEMS]
        self.assertEqual(len(set(names)), len(names))
        for program in {program for program, _ in names} - {"kvant"}:
            self.assertIn((program, "f16"), names)


class Speed(unittest.TestCase):
    def test_bench(self):
        text = """load
[
  {"n_depth": 0, "n_gen": 0, "avg_ts": 90.5},
  {"n_depth": 0, "n_gen": 32, "avg_ts": 15.0}
]
kvant: a line behind it"""
        self.assertEqual(read_bench(text), {0: (90.5, 15.0)})

    def test_sweep(self):
        text = f"""main: n_kv_max = {DEPTH}
|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |
|-------|--------|--------|----------|----------|----------|----------|
|   512 |    128 |      0 |    1.000 |   512.00 |    2.000 |    64.00 |
|   512 |    128 |    512 |    1.100 |   465.45 |    2.100 |    60.95 |
|   512 |    128 |   {DEPTH} |    2.000 |   256.00 |    4.000 |    32.00 |"""
        self.assertEqual(read_sweep(text), {0: (512.0, 64.0), DEPTH: (256.0, 32.0)})


def merged(text, merges):
    """The pieces of a text: neighbours are merged in the order of the merges."""
    pieces = list(text)
    for merge in merges:
        a, b = merge.split(" ")
        for i in range(len(pieces) - 2, -1, -1):
            if pieces[i : i + 2] == [a, b]:
                pieces[i : i + 2] = [a + b]
    return pieces


class Pieces(unittest.TestCase):
    def test_a_text_has_the_same_pieces_with_fewer_tokens(self):
        text = "the cat sat\non the mat"
        merges = ["t h", "th e", "a t", "c at", "d o", "do g", "s at", "\u0120 the", "o n"]
        tokens = {*byte_characters().values(), *(merge.replace(" ", "") for merge in merges)}
        shown = as_pieces(text, "gpt2")
        kept = {*byte_characters().values(), *pieces_in(shown, tokens)}
        few = kept_merges(merges, kept)
        self.assertNotIn("d o", few)
        self.assertIn("\u0120 the", few)
        self.assertEqual(merged(shown, few), merged(shown, merges))

    def test_every_byte_has_a_character(self):
        self.assertEqual(len(set(byte_characters().values())), 256)
        self.assertEqual(as_pieces("a b\n", "gpt2"), "a\u0120b\u010a")
        self.assertEqual(as_pieces("a b", "llama"), "a\u2581b")


def words(text):
    """Stands in for a tokenizer."""
    return len(text.split())


class Tasks(unittest.TestCase):
    def setUp(self):
        text = pathlib.Path(__file__)
        self.options = argparse.Namespace(text=text, questions=20)

    def test_prompts_have_their_length(self):
        for name, kind in tasks.TASKS.items():
            prompt = kind(self.options).prompt(words, 1500)
            self.assertLessEqual(words(prompt), 1500 - tasks.LEFT, name)
            self.assertGreater(words(prompt), 500, name)

    def test_every_needle_is_in_the_text_once(self):
        task = tasks.Needles(self.options)
        prompt = task.prompt(words, 1500)
        for question, number in task.questions():
            key = question.split(" of ")[1].rstrip("?")
            self.assertEqual(prompt.count(f"{key} is {number}."), 1)
            self.assertEqual(task.begin(question), f"The special magic value of {key} is")
        self.assertEqual(task.read(" 12345.\n67"), "12345")
        self.assertIsNone(task.read("none"))

    def test_calls_fit_their_schemas(self):
        task = tasks.Tools(self.options)
        kinds = {"string": str, "integer": int}
        for (question, call), tool in zip(task.questions(), task.tools):
            self.assertEqual(call["name"], tool["name"])
            for name, value in call["arguments"].items():
                self.assertIn(str(value), question)
                self.assertIs(type(value), kinds[tool["arguments"][name]["type"]])
            self.assertEqual(task.read(json.dumps(call)), call)
        self.assertIsNone(task.read('{"name": "book'))

    def test_problems_have_the_results_that_they_say(self):
        task = tasks.Arithmetic(self.options)
        for question, result in task.questions():
            boxes, each, some = map(int, re.findall(r"\d+", question))
            self.assertIn(int(result), (boxes * each - some, boxes * each + some))
            self.assertEqual("gives" in question, int(result) == boxes * each - some)
        self.assertEqual(task.read(" 3 * 4 = 12. 12 + 5 = 17. The answer is 17."), "17")

    def test_intervals(self):
        low, high = tasks.wilson(32, 64)
        self.assertAlmostEqual(low, 0.381, 3)
        self.assertAlmostEqual(high, 0.619, 3)
        self.assertEqual(tasks.wilson(64, 64)[1], 1)


if __name__ == "__main__":
    unittest.main()
