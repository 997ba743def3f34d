"""The kvant command without a model: help, errors, exit codes, codecs. test_exec_options.py tests
kvant exec.
"""

import json
import pathlib
import tempfile
import unittest

import settings
from testing import PLUGIN, SRC, run, temporary_folder

OK, RUNTIME, USAGE = 0, 1, 2
COMMANDS = ["codecs", "plugin-path", "exec", "bench"]
LLAMA_COMMANDS = ["run", "eval", "needle", "report", "inspect", "capture", "tune"]


class Help(unittest.TestCase):
    def test_no_command_is_a_usage_error_and_says_how(self):
        done = run(code=USAGE)
        self.assertEqual(done.stdout, "")
        self.assertIn("usage: kvant", done.stderr)

    def test_help_lists_every_command_on_stdout(self):
        for arguments in (["--help"], ["-h"], ["help"]):
            done = run(*arguments)
            self.assertEqual((done.returncode, done.stderr), (OK, ""))
            for command in COMMANDS + LLAMA_COMMANDS:
                self.assertIn(f"\n  {command} ", done.stdout)

    def test_every_command_has_help(self):
        commands = COMMANDS + (LLAMA_COMMANDS if SRC else [])
        for command in commands:
            for arguments in ([command, "--help"], [command, "-h"], ["help", command]):
                done = run(*arguments)
                self.assertEqual((done.returncode, done.stderr), (OK, ""), arguments)
                self.assertIn(f"usage: kvant {command}", done.stdout)

    def test_version(self):
        for word in ("--version", "-V", "-v", "version"):
            done = run(word)
            self.assertEqual((done.returncode, done.stderr), (OK, ""))
            self.assertRegex(done.stdout, r"^kvant \d+\.\d+\.\d+ \(CPU level \w+; ")

    def test_list_is_codecs(self):
        self.assertEqual(run("list").stdout, run("codecs").stdout)

    def test_examples_show_presets(self):
        """Users copy the first example, so it must not have a codec that breaks a model."""
        for command in [[], ["exec"], ["plugin-path"]] + (
            [["run"], ["eval"], ["needle"], ["bench", "model"]] if SRC else []
        ):
            text = run(*command, "--help").stdout
            self.assertNotIn("turboquant-4 ", text.partition("example")[2], command)

    def test_unknown_command_suggests_the_closest(self):
        done = run("codcs", code=USAGE)
        self.assertIn("unknown command 'codcs'", done.stderr)
        self.assertIn("did you mean 'codecs'?", done.stderr)

    def test_a_beginning_wins(self):
        self.assertIn("did you mean 'tune'?", run("tun").stderr)
        self.assertIn("did you mean 'calibrate'?", run("Calib").stderr)

    def test_unknown_and_ambiguous_options_are_told_apart(self):
        for option, said in (
            ("--temperature", "unknown option --temperature\n  hint: did you mean --temp?"),
            ("--TOP-K", "unknown option --TOP-K\n  hint: did you mean --top-k?"),
            ("--top", "--top is ambiguous: it may be --top-k or --top-p"),
            ("--raw=1", "--raw takes no value"),
        ):
            if SRC:
                done = run("run", option, "1")
                self.assertEqual((done.returncode, done.stdout), (USAGE, ""))
                self.assertIn(f"run: {said}\n", done.stderr)

    def test_no_suggestion_for_something_else(self):
        done = run("xyzzy", code=USAGE)
        self.assertNotIn("did you mean", done.stderr)

    def test_unknown_option_suggests_the_closest(self):
        done = run("codecs", "--jsno", code=USAGE)
        self.assertIn("did you mean --json?", done.stderr)

    def test_missing_value_and_surplus_word(self):
        self.assertEqual(run("codecs", "--head-dim").returncode, USAGE)
        done = run("codecs", "turboquant-4", code=USAGE)
        self.assertIn("unexpected word 'turboquant-4'", done.stderr)


class BenchEncode(unittest.TestCase):
    def test_f16_comes_first_and_ratios_refer_to_it(self):
        done = run(*"bench encode -k int-4 -k turboquant-3 --head-dim 64 -r 3 --json".split())
        self.assertEqual((done.returncode, done.stderr), (OK, ""))
        rows = json.loads(done.stdout)
        self.assertEqual(
            [(row["spec"], row["role"]) for row in rows],
            [(spec, role) for spec in ("f16", "int-4", "turboquant-3") for role in "KV"],
        )
        for row in rows:
            rival = rows[0 if row["role"] == "K" else 1]
            self.assertGreater(row["microseconds"], 0)
            self.assertAlmostEqual(
                row["ratio_to_f16"], row["microseconds"] / rival["microseconds"], places=6
            )

    def test_unknown_codec_and_level(self):
        done = run("bench", "encode", "-k", "nope")
        self.assertEqual((done.returncode, done.stdout), (USAGE, ""))
        self.assertIn("there is no codec 'nope'", done.stderr)
        done = run("--cpu", "mmx", "bench", "encode")
        self.assertEqual((done.returncode, done.stdout), (USAGE, ""))
        self.assertIn("'mmx' is not auto, c, avx2", done.stderr)
        self.assertEqual(run("--cpu").returncode, USAGE)

    def test_level_before_the_command_is_the_one_used(self):
        self.assertIn("(CPU level c;", run("--cpu", "c", "--version").stdout)
        rows = json.loads(
            run("--cpu", "c", "bench", "encode", "-k", "int-4", "-r", "1", "--json").stdout
        )
        self.assertEqual({row["level"] for row in rows}, {"c"})


class Codecs(unittest.TestCase):
    def rows(self, *arguments):
        done = run("codecs", "--json", *arguments)
        self.assertEqual((done.returncode, done.stderr), (OK, ""))
        return json.loads(done.stdout)

    def test_json_is_an_array_of_flat_objects(self):
        rows = self.rows()
        self.assertGreater(len(rows), 10)
        for row in rows:
            self.assertLessEqual(
                {"spec", "family", "true_bits", "nominal_bits", "source", "options", "head_dim"},
                set(row),
            )
            for value in row.values():
                self.assertNotIsInstance(value, (dict, list))

    def test_true_bits_are_the_page_bytes(self):
        for head_dim in (64, 128):
            for row in self.rows("--head-dim", head_dim):
                for role in "kv":
                    if row[f"true_bits_{role}"] is not None:
                        bits = 8 * row[f"page_bytes_{role}"] / (64 * head_dim)
                        self.assertAlmostEqual(row[f"true_bits_{role}"], bits, 9)

    def test_known_bits(self):
        # A row of 64 numbers has one 16-bit scale, a quarter of a bit per number. Raw fp16 has no
        # metadata.
        bits = {row["spec"]: row["true_bits"] for row in self.rows("--head-dim", 64)}
        self.assertEqual(bits["turboquant-4"], 4.25)
        self.assertEqual(bits["f16"], 16)

    def test_table_and_json_list_the_same_specs(self):
        table = run("codecs", "--all").stdout.split("\n\n")[0].splitlines()[1:]
        self.assertEqual([line.split()[0] for line in table], [row["spec"] for row in self.rows()])

    def test_presets_come_first(self):
        """At head_dim 64 a row of 64 numbers has one 16-bit scale: a quarter of a bit per
        number.
        """
        lines = run("codecs", "-d", "64").stdout.splitlines()
        self.assertEqual(
            [line.split()[:2] for line in lines[:5]],
            [
                ["preset", "bits"],
                ["quality", "5.25"],
                ["balanced", "4.25"],
                ["small", "3.25"],
                ["tiny", "2.25"],
            ],
        )
        self.assertEqual(
            run("codecs", "-d", "256").stdout.splitlines()[4].split()[:2], ["tiny", "2.25"]
        )  # keys get the bits that the scale saves
        families = {row["family"] for row in self.rows()}
        self.assertEqual({line.split()[0] for line in lines[7 : 7 + len(families)]}, families)
        self.assertIn("kvant codecs --all", lines[-1])
        self.assertLess(len(lines), 30)

    def test_head_dim_is_checked(self):
        for bad in ("0", "513", "-1", "64x", "", "1e2", "99999999999999999999"):
            done = run("codecs", "--head-dim", bad)
            self.assertEqual(done.returncode, USAGE, bad)
            self.assertIn("from 1 to 512", done.stderr)

    def test_unwritable_output_fails(self):
        with open("/dev/full", "w") as full:
            done = run("codecs", stdout=full)
        self.assertEqual(done.returncode, RUNTIME)
        self.assertIn("cannot write to standard output: No space left", done.stderr)


class PluginPath(unittest.TestCase):
    @unittest.skipUnless(PLUGIN, "the plug-in is not built")
    def test_prints_an_absolute_path(self):
        done = run("plugin-path", KVANT_PLUGIN="", code=OK)
        path = pathlib.Path(done.stdout.strip())
        self.assertTrue(path.is_absolute() and path.samefile(PLUGIN))

    def test_override_that_is_not_there(self):
        done = run("plugin-path", KVANT_PLUGIN="/nowhere/libggml-kvant.so")
        self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""))
        self.assertIn("/nowhere/libggml-kvant.so", done.stderr)


@unittest.skipUnless(SRC, "built without llama.cpp's headers")
class LlamaErrors(unittest.TestCase):
    def setUp(self):
        self.folder = temporary_folder(self.addCleanup)
        self.file = self.folder / "file"
        self.file.write_text("not a model\n" * 100)

    def check(self, arguments, code, *words, **environment):
        done = run(*arguments, **environment)
        self.assertEqual((done.returncode, done.stdout), (code, ""), done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)

    def test_what_is_needed_is_named(self):
        self.check(["eval", "-f", self.file], USAGE, "no model given", "-m ")
        self.check(["eval", "-m", self.file], USAGE, "no text given", "-f ")
        self.check(["run", "-m", self.file], USAGE, "no prompt given")
        self.check(["needle"], USAGE, "no model given")
        self.check(["bench", "model"], USAGE, "no model given")

    def test_a_file_that_is_no_model(self):
        self.check(
            ["run", "-p", "x", "-m", self.file],
            RUNTIME,
            f"model {self.file}: this is not a .gguf file\n",
        )

    def test_the_calibration_beside_the_model_is_found(self):
        """Every command that has a model and uses a calibration says that the file is no
        calibration, before it loads the model.
        """
        model = self.folder / "model.gguf"
        model.write_text("GGUF, but not really")
        (self.folder / "model.kvcal").write_text("no calibration")
        out = self.folder / "out"
        for command in (
            ["run", "-p", "x"],
            ["eval", "-f", self.file],
            ["needle"],
            ["inspect"],
            ["bench", "model"],
            ["report", "-f", self.file, "-o", out],
            ["tune", "-f", self.file, "-o", out, "--bits", "4"],
        ):
            with self.subTest(command=command):
                self.check(
                    [*command, "-m", model],
                    RUNTIME,
                    "model.kvcal is not used: this is not a calibration file",
                )

    def test_formats_exclude_each_other(self):
        self.check(["eval", "--json", "--csv"], USAGE, "--json and --csv are two formats")

    def test_missing_model(self):
        for command in (["eval", "-f", self.file], ["run", "-p", "x"], ["bench", "model"]):
            self.check([*command, "-m", "/nowhere.gguf"], RUNTIME, "/nowhere.gguf", "No such file")

    def test_runtime_without_libllama(self):
        self.check(
            ["run", "-p", "x", "-m", self.file, "--runtime", self.folder],
            RUNTIME,
            "no libllama",
            "hint:",
        )
        self.check(
            ["run", "-p", "x", "-m", self.file],
            RUNTIME,
            "/nowhere-runtime",
            KVANT_RUNTIME="/nowhere-runtime",
        )

    def test_names_of_libllama(self):
        """The library's names in a developer's build, a package registry and a distribution. In
        this test each is a text file.
        """
        for name in (
            "libllama.so",
            "libllama.v0.5.0.so",
            "libllama.so.0",
            "libllama.b7347.so.0.0.1",
        ):
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                pathlib.Path(folder, "libllama-common.so.0").write_text("not the library")
                pathlib.Path(folder, name).write_text("no library")
                self.check(
                    ["run", "-p", "x", "-m", self.file, "--runtime", folder], RUNTIME, f"{name}: "
                )

    def test_bad_specs_and_types(self):
        base = ["eval", "-m", self.file, "-f", self.file]
        self.check([*base, "-k", "nonsense"], USAGE, "nonsense")
        self.check([*base, "-k", "int-8", "-v", "nonsense"], USAGE, "nonsense")
        self.check([*base, "-v", "int-8"], USAGE, "no -k before it")
        self.check([*base, "--stock", "q8_0", "-v", "int-8"], USAGE, "no -k before it")
        self.check(
            [*base, "--stock", "q8_0", "--fp32"], USAGE, "no -k, --preset or --config before it"
        )
        self.check([*base, "--stock", "q3_0"], USAGE, "q3_0", "q8_0")
        self.check([*base, "--stock", "q8_0/"], USAGE, "no cache type ''")
        self.check(
            ["run", "-m", self.file, "-p", "x", "-k", "int-8", "-k", "int-4"], USAGE, "run uses one"
        )

    def test_presets_and_settings_files(self):
        base = ["eval", "-m", self.file, "-f", self.file]
        good = self.folder / "model.kvant"
        good.write_text(settings.plain(2, "1x64", "int-8", "f16"))
        self.check(
            [*base, "--preset", "large"],
            USAGE,
            "no preset 'large'",
            "quality, balanced, small or tiny",
        )
        self.check([*base, "--config", self.file], USAGE, "not a settings file")
        self.check([*base, "--config", "/nowhere.kvant"], USAGE, "/nowhere.kvant", "No such file")
        for option, value in (("--preset", "small"), ("--config", good)):
            self.check([*base, option, value, "-v", "int-8"], USAGE, "no -k before it")
            self.check(
                ["run", "-m", self.file, "-p", "x", "-k", "int-8", option, value],
                USAGE,
                "run uses one",
            )
        self.check(
            [*base, "--config", good, "--protect", "1"], USAGE, "so --protect does not apply"
        )
        self.check(
            [*base, "--protect", "1", "--config", good], USAGE, "so --protect does not apply"
        )

    def test_bad_numbers(self):
        base = ["eval", "-m", self.file, "-f", self.file]
        self.check(["needle", "-m", self.file, "-c", "100"], USAGE, "--ctx", "256")
        self.check(["needle", "-m", self.file, "-n", "25"], USAGE, "--needles", "24")
        for bad in ("0", "-1", "x", "1.5", "99999999999"):
            self.check([*base, "-c", bad], USAGE, "--ctx", bad)
            self.check([*base, "--chunks", bad], USAGE, "--chunks")
            self.check([*base, "-t", bad], USAGE, "--threads")
        self.check(["run", "-m", self.file, "-p", "x", "--temp", "nan"], USAGE, "--temp")
        self.check(["bench", "model", "-m", self.file, "-d", "0,,5"], USAGE, "--depth")
        self.check(
            ["bench", "model", "-m", self.file, "-p", "0", "-n", "0"], USAGE, "nothing to measure"
        )

    def test_without_the_plugin_the_reason_is_clear(self):
        done = run("exec", "-k", "int-8", "env", KVANT_PLUGIN="/nowhere.so", code=RUNTIME)
        self.assertIn("KVANT_PLUGIN=/nowhere.so", done.stderr)


if __name__ == "__main__":
    unittest.main()
