"""kvant inspect: the memory of a cache, as the plug-in and llama.cpp take it."""

import os
import pathlib
import re
import tempfile
import unittest

from testing import N_LAYERS as SMALL_LAYERS, ON_SMALL, SMALL, rows_of, run

OK, RUNTIME, USAGE = 0, 1, 2
TINY = pathlib.Path(os.environ.get("KVANT_TINY_MODELS", "tiny"))  # tests/integration/tiny_models.py
ON_CPU = 512 - SMALL_LAYERS  # a layer is compressed before each of the last of 512 tokens
# SmolLM2-135M-Instruct.
N_KV_HEADS, HEAD_DIM = 3, 64


def full(rows):
    return [row for row in rows if row["filled"] == 100]


def learning_room():
    """The bytes in which a GPU learns one W for each head of 8 layers (src/device/learn_room.h).
    Heads count as 128 channels. 512 keys and 256 tokens of 16 query heads are added in slices of
    128 vectors.
    """
    heads, d, keys, tokens = 8 * ((N_KV_HEADS * HEAD_DIM + 127) // 128), 128, 512, 256
    queries = 16 * tokens
    parts = [
        (keys + tokens) * d * 4,  # rotations by RoPE
        heads * (keys + queries),  # which vectors count
        heads * (2 * d + 1) * 4,  # their rule
        heads * (keys // 128 * d + (keys + queries) // 128 * d * d) * 4,  # sums
        heads * (2 + (2 + 3 * 23 + 4) * d) * 8,  # counts, means and rotations, for 23 buckets
        heads * 2 * 8,  # the balance of keys and queries
        heads * (keys + queries) * d * 4,  # the vectors, more than the matrices of float64
    ]
    lists = 64 * (8 * 8 + 2 * 8 + 7 * 8)  # pointers of 64 layers
    return lists + sum((part + 255) // 256 * 256 for part in parts)


class Inspect(unittest.TestCase):
    def test_rows(self):
        rows = rows_of(run("inspect", *ON_SMALL, *"--stock q4_0 -k int-4 -v int-2 --json".split()))
        self.assertEqual(
            [(row["cache"], row["k"], row["v"]) for row in rows],
            [("llama.cpp", "q4_0", "q4_0"), ("kvant", "int-4", "int-2")],
        )
        self.assertEqual(rows[0]["bits"], 4.5)
        self.assertLess(3, rows[1]["bits"])
        for row in rows:
            self.assertEqual(row["n_ctx_train"], 8192)
            self.assertRegex(row["model_fingerprint"], "^[0-9a-f]{16}$")
            self.assertRegex(row["text_fingerprint"], "^[0-9a-f]{16}$")
            self.assertGreater(row["text_tokens"], 1000)

    def test_names_that_are_no_text(self):
        """A model's name may have any bytes. JSON has to be UTF-8 nevertheless."""
        model = bytearray(pathlib.Path(SMALL).read_bytes())
        at = model.index(b"general.name") + len("general.name") + 4 + 8
        # Bytes that begin nothing, a character that is cut short, one that is too long, a
        # surrogate, a number beyond Unicode, and two characters.
        pattern = (
            b'\xff\x80"\xc3(\xe0\x80\x80\xed\xa0\x80\xf4\x90\x80\x80\xf0\x9f\x98\x80\xc3\xa4\x01'
        )
        end = at + int.from_bytes(model[at - 8 : at], "little")
        model[at:end] = name = (9 * pattern)[: end - at]
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "m.gguf")
            path.write_bytes(model)
            done = run("inspect", "-m", path, "--json")  # decodes as UTF-8
        (row,) = rows_of(done)
        self.assertEqual(row["model"], name.decode("utf-8", "surrogateescape"))

    def test_names_that_would_change_a_terminal(self):
        """Control characters of a model's name become blanks in tables and are escaped in JSON."""
        model = bytearray(pathlib.Path(SMALL).read_bytes())
        at = model.index(b"general.name") + len("general.name") + 4 + 8
        end = at + int.from_bytes(model[at - 8 : at], "little")
        model[at:end] = name = (9 * b"\x1b]0;\xc2\x9b\x7f\n\xc3\x9b")[: end - at]
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "m.gguf")
            path.write_bytes(model)
            table, json_rows = run("inspect", "-m", path), run("inspect", "-m", path, "--json")
        shown = name
        for control in (b"\x1b", b"\xc2\x9b", b"\x7f", b"\n"):
            shown = shown.replace(control, b" " * len(control))
        first = table.stdout.splitlines()[0].encode("utf-8", "surrogateescape")
        self.assertTrue(first.startswith(shown + b", contexts"), first)
        self.assertNotRegex(json_rows.stdout, "[\x00-\x09\x0b-\x1f\x7f-\x9f]")
        self.assertEqual(rows_of(json_rows)[0]["model"], name.decode("utf-8", "surrogateescape"))

    def test_without_a_text(self):
        row = rows_of(run("inspect", "-m", SMALL, "--json"))[0]
        self.assertEqual(
            (row["preset"], row["text_tokens"], row["text_fingerprint"]), ("balanced", None, None)
        )
        done = run("inspect", "-m", SMALL)
        self.assertIn("contexts of up to 8192 tokens\n", done.stdout)

    def test_sizes_are_those_of_the_line_at_the_start(self):
        """The plug-in and the command use one formula: they report the same bytes, bits and memory
        for learning.
        """
        for n_ctx in ("512", "2048"):
            done = run("inspect", "-m", SMALL, "-c", n_ctx, "--preset", "small", "--json")
            (row,) = full(rows_of(done))
            words = ("--preset", "small", "-c", n_ctx, "-p", "Hello", "-n", "1")
            done = run("run", "-m", SMALL, *words, KVANT_QUIET="0")
            said = re.search(
                r"KV cache small: ([\d.]+) bits per number, .* layers, ([\d.]+) MiB "
                r"for (\d+) tokens \(f16: ([\d.]+) MiB\), and ([\d.]+) MiB while it "
                "learns",
                done.stderr,
            ).groups()
            f16 = 16 / row["cache_bits"] * row["kv_bytes"]
            mib = [f"{b / 2**20:.1f}" for b in (row["kv_bytes"], f16, row["working_bytes"])]
            self.assertEqual(said, (f"{row['cache_bits']:.2f}", mib[0], n_ctx, *mib[1:]))
            self.assertEqual(row["tokens_per_gib"], int(2**30 * int(n_ctx) / row["kv_bytes"]))
            self.assertLess(row["transform_bytes"] + row["exact_bytes"], row["kv_bytes"])

    def test_llama_cpps_own_take_what_they_allocate(self):
        """llama.cpp's own cache has all its memory from the start, whatever is written."""
        stock = ("--stock", "f16", "--stock", "q8_0/q4_0")
        rows = rows_of(run("inspect", "-m", SMALL, "-c", "300,1024", *stock, "--json"))
        cells = [
            (ctx, cells * share // 4, 25 * share)  # in steps of 256
            for ctx, cells in ((300, 512), (1024, 1024))
            for share in (1, 2, 4)
        ]
        self.assertEqual([(row["ctx"], row["tokens"], row["filled"]) for row in rows], 2 * cells)
        for row, bits in zip(rows, (*6 * [16], *6 * [6.5])):
            numbers = 2 * row["tokens"] * SMALL_LAYERS * N_KV_HEADS * HEAD_DIM
            wanted = (bits * 100 / row["filled"], numbers * bits / 8 * 100 / row["filled"])
            self.assertEqual((row["cache_bits"], row["kv_bytes"]), wanted)
            self.assertEqual(row["code_bytes"], row["kv_bytes"])
            for key in ("transform_bytes", "exact_bytes", "working_bytes"):
                self.assertEqual(row[key], 0)

    def columns(self, *words):
        done = run("inspect", "-m", SMALL, *words, code=OK)
        _, *lines = done.stdout.splitlines()
        return [re.split("  +", line.strip()) for line in lines]

    def test_the_table(self):
        header, *lines = self.columns("-c", "4096")
        self.assertEqual(
            header,
            [
                "cache",
                "tokens",
                "codes",
                "exact rows",
                "transforms",
                "MiB in all",
                "bits",
                "while learning",
                "f16 in place",
            ],
        )
        caches = [
            "llama.cpp f16",
            "llama.cpp q8_0",
            "llama.cpp q4_0",
            "quality",
            "balanced",
            "small",
            "tiny",
        ]
        self.assertEqual(
            [tuple(line[:2]) for line in lines],
            [(cache, n) for cache in caches for n in ("1024", "2048", "4096")],
        )
        header, *lines = self.columns("-c", "4096", "--gpu", "--stock", "f16", "--preset", "tiny")
        self.assertEqual(header[-1], "f16 in place")
        self.assertEqual([line[-1] for line in lines], ["-"] * 3 + ["yes", "no", "no"])
        header = self.columns("-c", "4096", "-c", "131072", "--preset", "small")[0]
        self.assertEqual(header, ["cache", "MiB at 4096", "bits", "MiB at 131072", "bits"])

    def test_parts_of_a_cache_that_fills(self):
        """test_plugin_fill.c compares these sizes with the memory that a text really takes."""
        rows = rows_of(run("inspect", "-m", SMALL, "-c", "4096", "--preset", "balanced", "--json"))
        self.assertEqual(
            [(row["filled"], row["tokens"]) for row in rows], [(25, 1024), (50, 2048), (100, 4096)]
        )
        numbers = 2 * SMALL_LAYERS * N_KV_HEADS * HEAD_DIM
        for row in rows:
            parts = row["code_bytes"] + row["exact_bytes"] + row["transform_bytes"]
            self.assertEqual(row["kv_bytes"], parts)
            self.assertEqual(row["code_bytes"], 4.25 / 8 * numbers * row["tokens"])
            self.assertEqual(row["cache_bits"], 8 * row["kv_bytes"] / (numbers * row["tokens"]))
            self.assertEqual((row["in_place"], row["in_place_tokens"]), (False, ON_CPU))
        self.assertEqual(len({row["exact_bytes"] for row in rows}), 1)
        self.assertEqual(len({row["transform_bytes"] for row in rows}), 3)

    def test_until_when_a_gpus_cache_is_f16(self):
        """Pages for 4096 tokens take as many bytes as f16 rows of `fit` tokens. A layer is
        compressed before each of the last tokens that fit.
        """
        words = ("inspect", "-m", SMALL, "-c", "4096", "--preset", "balanced", "--json", "--gpu")
        rows = rows_of(run(*words, "--exact", "auto"))
        pages = (rows[0]["code_bytes"] + rows[0]["exact_bytes"]) / (2 * SMALL_LAYERS)
        fit = int(pages / (2 * N_KV_HEADS * HEAD_DIM)) // 256 * 256
        self.assertTrue(1024 <= fit - SMALL_LAYERS < 2048, fit)
        for row in rows:
            self.assertEqual(row["in_place_tokens"], fit - SMALL_LAYERS)
            self.assertIs(row["in_place"], row["filled"] == 25)
            self.assertEqual(row["code_bytes"], rows[0]["code_bytes"])
        self.assertEqual(rows_of(run(*words)), rows)
        self.assertEqual(rows_of(run(*words, KVANT_EXACT="auto")), rows)
        for variable, n in (("auto", "1000"), ("0", "1000")):  # the option comes first
            row = rows_of(run(*words, "--exact", n, KVANT_EXACT=variable))[0]
            self.assertEqual((row["in_place"], row["in_place_tokens"]), (False, 768 - SMALL_LAYERS))

    def test_until_when_a_cpus_cache_is_f16(self):
        """A CPU's cache takes 512 tokens, or as many as the user wants and its pages have room for.
        The largest number is a number like any other, and not auto. llama.cpp's own cache has no
        such number.
        """
        words = ("inspect", "-m", SMALL, "-c", "4096", "--preset", "balanced", "--json")
        counts = []
        for exact in ("auto", "1000", "4096", str(2**32 - 1)):
            row = rows_of(run(*words, "--exact", exact))[0]
            counts.append(row["in_place_tokens"])
            self.assertIs(row["in_place"], row["tokens"] <= row["in_place_tokens"])
        self.assertEqual(counts[:2], [ON_CPU, 768 - SMALL_LAYERS])
        self.assertGreater(counts[2], 1024)
        self.assertEqual(counts[2], counts[3])
        row = rows_of(run("inspect", "-m", SMALL, "-c", "512", "--stock", "f16", "--json"))[0]
        self.assertEqual((row["in_place"], row["in_place_tokens"]), (None, None))

    def test_a_gpus_sizes_need_none(self):
        caches = ("--preset", "balanced", "--stock", "q4_0")
        arguments = ("inspect", "-m", SMALL, "-c", "2048", *caches, "--json")
        here, there = (full(rows_of(run(*arguments, *words))) for words in ((), ("--gpu",)))
        self.assertEqual(here[1], there[1])
        # Each tensor has 7 exact pages: the first, the newest, four for a step, and one because
        # rows begin anywhere in a block. Learning takes two matrices for each layer's keys, room
        # for a layer's exact pages as float32 rows with their slots, and room for 8 layers.
        page = 64 * N_KV_HEADS * HEAD_DIM * 2
        self.assertEqual(there[0]["exact_bytes"], 2 * SMALL_LAYERS * 7 * page)
        matrices = 2 * SMALL_LAYERS * N_KV_HEADS * HEAD_DIM**2 * 4
        room = 7 * 64 * (N_KV_HEADS * HEAD_DIM * 4 + 8)
        self.assertEqual(there[0]["working_bytes"], matrices + room + learning_room())
        # In the computer's memory: the first block, and the newest 64 tokens, which begin anywhere
        # in a block. The rows of a step have 8 blocks once for all keys, and once for all values.
        self.assertEqual(here[0]["exact_bytes"], (2 * SMALL_LAYERS * (1 + 1 + 1) + 2 * 8) * page)

    def test_windows_and_other_layers(self):
        """Two of four layers have a window of 64 tokens. Their cache holds it and one graph of 512,
        in steps of 256. The memory of kvant's learning for them depends on the context. The two
        recurrent layers of lfm2 have no keys and values and are not counted. The model deepseek2
        has only keys.
        """

        def sized(model, *words):
            words = ("inspect", "-m", TINY / f"{model}.gguf", *words, "-c", "4096", "--json")
            return full(rows_of(run(*words)))

        caches = ("--stock", "f16", "--preset", "balanced", "-k", "turboquant-4")
        rows = sized("gemma3", *caches)
        numbers = (2 * 4096 + 2 * 768) * 2 * 2 * 64
        sizes = [row["kv_bytes"] / numbers for row in (rows[0], rows[2])]
        self.assertEqual(sizes, [2, 4.25 / 8])
        self.assertEqual({row["tokens"] for row in rows}, {4096})
        (without,) = sized("llama", "--preset", "balanced")
        self.assertEqual(rows[1]["transform_bytes"], without["transform_bytes"])
        rows = [sized(model, "--stock", "f16")[0] for model in ("lfm2", "llama")]
        self.assertEqual(2 * rows[0]["kv_bytes"], rows[1]["kv_bytes"])
        done = run("inspect", "-m", TINY / "deepseek2.gguf", "-c", "512")
        self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""))
        self.assertIn("no cache of keys and values that kvant compresses", done.stderr)
        (row,) = rows_of(run("inspect", "-m", TINY / "lfm2.gguf", "--json"))
        self.assertEqual(row["bits"], 4.25)

    def test_what_does_not_matter_is_no_option(self):
        for words in (["--accel"], ["--fp32"], ["-t", "2"]):
            done = run("inspect", "-m", SMALL, "--stock", "q8_0", *words)
            self.assertEqual((done.returncode, done.stdout), (USAGE, ""))
            self.assertIn("unknown option", done.stderr)

    def test_refusals(self):
        for arguments, code, words in [
            ([], USAGE, "no model given"),
            (["-m", SMALL, "--gpu"], USAGE, "give -c"),
            (["-m", SMALL, "--exact", "auto"], USAGE, "give -c"),
            (["-m", SMALL, "-c", "512", "--gpu", "--exact", "all"], USAGE, "--exact all"),
            (["-m", SMALL, "-c", "512", "--gpu", "--exact", ""], USAGE, "--exact"),
            (["-m", SMALL, "-c", "7"], USAGE, "--ctx"),
            (["-m", SMALL, *(f"-c{512 + n}" for n in range(7))], USAGE, "more than 6 contexts"),
            (["-m", SMALL, "-k", "int-44"], USAGE, "int-44"),
            (["-m", SMALL, "-f", "/nonexistent"], RUNTIME, "/nonexistent"),
            (["-m", "/nonexistent.gguf"], RUNTIME, "/nonexistent.gguf"),
        ]:
            with self.subTest(arguments=arguments):
                done = run("inspect", *arguments)
                self.assertEqual((done.returncode, done.stdout), (code, ""), done.stderr)
                self.assertIn(words, done.stderr)


if __name__ == "__main__":
    unittest.main()
