"""The kvant command without a model: help, errors, exit codes, codecs, exec."""

import json
import os
import pathlib
import tempfile
import unittest
import unittest.mock

import settings
from testing import KVANT, PLUGIN, SRC, program, run

OK, RUNTIME, USAGE, NOT_FOUND = 0, 1, 2, 127
COMMANDS = ["codecs", "plugin-path", "exec", "bench"]
LLAMA_COMMANDS = ["run", "eval", "needle", "report", "inspect", "capture", "tune"]


class Help(unittest.TestCase):
    def test_no_command_is_a_usage_error_and_says_how(self):
        done = run()
        self.assertEqual(done.returncode, USAGE)
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
        done = run("codcs")
        self.assertEqual(done.returncode, USAGE)
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
        done = run("xyzzy")
        self.assertEqual(done.returncode, USAGE)
        self.assertNotIn("did you mean", done.stderr)

    def test_unknown_option_suggests_the_closest(self):
        done = run("codecs", "--jsno")
        self.assertEqual(done.returncode, USAGE)
        self.assertIn("did you mean --json?", done.stderr)

    def test_missing_value_and_surplus_word(self):
        self.assertEqual(run("codecs", "--head-dim").returncode, USAGE)
        done = run("codecs", "turboquant-4")
        self.assertEqual(done.returncode, USAGE)
        self.assertIn("unexpected word 'turboquant-4'", done.stderr)


class BenchEncode(unittest.TestCase):
    def test_f16_comes_first_and_ratios_refer_to_it(self):
        done = run(
            "bench",
            "encode",
            "-k",
            "int-4",
            "-k",
            "turboquant-3",
            "--head-dim",
            "64",
            "-r",
            "3",
            "--json",
        )
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
        done = run("plugin-path", KVANT_PLUGIN="")
        self.assertEqual(done.returncode, OK, done.stderr)
        path = pathlib.Path(done.stdout.strip())
        self.assertTrue(path.is_absolute() and path.samefile(PLUGIN))

    def test_override_that_is_not_there(self):
        done = run("plugin-path", KVANT_PLUGIN="/nowhere/libggml-kvant.so")
        self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""))
        self.assertIn("/nowhere/libggml-kvant.so", done.stderr)


@unittest.skipUnless(PLUGIN, "the plug-in is not built")
class Exec(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.server = program(self.folder.name, "llama-server", 'printf "%s\\n" "$@"')

    def environment(self, *arguments, **environment):
        done = run("exec", *arguments, "--", "env", **environment)
        self.assertEqual(done.returncode, OK, done.stderr)
        return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)

    def arguments(self, *given, **environment):
        done = run("exec", "-k", "turboquant-4", "--", self.server, *given, **environment)
        self.assertEqual(done.returncode, OK, done.stderr)
        return done.stdout.splitlines(), done.stderr

    def test_environment(self):
        env = self.environment("-k", "turboquant-4", "-v", "int-8")
        self.assertTrue(pathlib.Path(env["GGML_BACKEND_PATH"]).samefile(PLUGIN))
        self.assertEqual((env["KVANT_K"], env["KVANT_V"]), ("turboquant-4", "int-8"))

    def test_how_much_is_said(self):
        env = self.environment("--verbose")
        self.assertEqual((env["KVANT_VERBOSE"], env.get("KVANT_QUIET")), ("1", None))
        self.assertEqual(self.environment("--quiet")["KVANT_QUIET"], "1")

    @unittest.mock.patch.dict(os.environ)
    def test_openmp_threads_spin_briefly_unless_told_otherwise(self):
        os.environ.pop("GOMP_SPINCOUNT", None)
        os.environ.pop("OMP_WAIT_POLICY", None)
        for arguments in ["-k", "int-8"], ["--accel"]:
            self.assertEqual(self.environment(*arguments)["GOMP_SPINCOUNT"], "5000")
        self.assertEqual(self.environment(GOMP_SPINCOUNT="7")["GOMP_SPINCOUNT"], "7")
        env = self.environment(OMP_WAIT_POLICY="active")
        self.assertEqual((env["OMP_WAIT_POLICY"], env.get("GOMP_SPINCOUNT")), ("active", None))

    def test_one_spec_is_for_both(self):
        env = self.environment("-k", "int-8")
        self.assertEqual((env["KVANT_K"], env["KVANT_V"]), ("int-8", "int-8"))
        env = self.environment("-k", "int-8", KVANT_V="f16")
        self.assertEqual((env["KVANT_K"], env["KVANT_V"]), ("int-8", "int-8"))

    def test_specs_from_the_environment_stay(self):
        env = self.environment(KVANT_K="int-8", KVANT_V="f16")
        self.assertEqual((env["KVANT_K"], env["KVANT_V"]), ("int-8", "f16"))

    def test_default_is_a_preset(self):
        self.assertEqual(self.environment()["KVANT_PRESET"], "balanced")
        self.assertEqual(self.environment("--preset", "balanced")["KVANT_PRESET"], "balanced")

    def test_presets(self):
        for arguments, environment in (["--preset", "small"], {}), ([], {"KVANT_PRESET": "small"}):
            env = self.environment(*arguments, **environment)
            self.assertEqual(env["KVANT_PRESET"], "small")
            self.assertFalse({"KVANT_K", "KVANT_V"} & set(env))
        env = self.environment("-k", "int-8", KVANT_PRESET="small")
        self.assertEqual((env["KVANT_K"], env.get("KVANT_PRESET")), ("int-8", None))
        for arguments, environment in (["--preset", "large"], {}), ([], {"KVANT_PRESET": "large"}):
            done = run("exec", *arguments, "--", self.server, **environment)
            self.assertEqual((done.returncode, done.stdout), (USAGE, ""))
            self.assertIn("no preset 'large'", done.stderr)
            self.assertIn("quality, balanced, small or tiny", done.stderr)

    def config(self, text):
        path = pathlib.Path(self.folder.name) / "model.kvant"
        path.write_text(text)
        return path

    def test_settings_file(self):
        path = self.config(settings.plain(2, "1x64", "int-8", "f16"))
        for arguments, environment in (
            (["--config", path], {"KVANT_K": "int-4"}),
            ([], {"KVANT_CONFIG": str(path)}),
        ):
            env = self.environment(*arguments, **environment)
            self.assertEqual(env["KVANT_CONFIG"], str(path))
            self.assertFalse({"KVANT_K", "KVANT_V", "KVANT_PRESET", "KVANT_PROTECT"} & set(env))
        self.assertNotIn("KVANT_CONFIG", self.environment("-k", "int-8", KVANT_CONFIG=str(path)))

    def test_settings_file_chooses_alone(self):
        path = self.config(settings.plain(2, "1x64", "int-8", "f16"))
        for options in (["-k", "f16"], ["-v", "f16"], ["--preset", "small"], ["--protect", "1"]):
            done = run("exec", "--config", path, *options, "--", self.server)
            self.assertEqual((done.returncode, done.stdout), (USAGE, ""), options)
            self.assertIn("--config", done.stderr)
            self.assertIn("hint:", done.stderr)
        done = run("exec", self.server, KVANT_CONFIG=str(path), KVANT_V="f16")
        self.assertEqual((done.returncode, done.stdout), (USAGE, ""))
        self.assertIn("KVANT_CONFIG", done.stderr)

    def test_bad_settings_files(self):
        good = settings.plain(2, "1x64", "int-8", "f16")
        for text, said in (
            (good[:-30], "cut short"),
            (good.replace("int-8", "int-4"), "changed by hand"),
            (
                settings.plain(2, "1x64", "int-9", "f16"),
                "layer 0, keys, int-9: int takes 2 to 8 bits",
            ),
            (
                settings.seal("kvant-settings 9\nlayers 1\nk 0 1x64 f16\nv 0 1x64 f16\n"),
                "version 9",
            ),
            (
                settings.seal("kvant-settings 1\nlayers 2\nk 0 1x64 f16\nv 0-1 1x64 f16\n"),
                "no codec for keys of layer 1",
            ),
            (
                settings.seal("kvant-settings 1\nlayers 1\nk 0 1x64 f16\nv 0,0 1x64 f16\n"),
                "line 4: values of layer 0",
            ),
            (
                settings.seal(
                    "kvant-settings 1\nlayers 1\ncalibration 0123456789abcdef no.kvcal\n"
                    "k 0 1x64 f16\nv 0 1x64 f16\n"
                ),
                "no.kvcal: No such file",
            ),
            (
                "a text of another kind, long enough to be a settings file of kvant\n",
                "not a settings file",
            ),
            ("", "not a settings file"),
        ):
            path = self.config(text)
            for command in (
                ["exec", "--config", path, "--", self.server],
                ["codecs", "--config", path],
            ):
                done = run(*command)
                self.assertEqual((done.returncode, done.stdout), (USAGE, ""), text)
                self.assertIn(f"--config {path}: ", done.stderr)
                self.assertIn(said, done.stderr)

    def test_settings_file_as_a_table(self):
        path = self.config(settings.plain(2, "1x64", "int-8", "f16"))
        rows = json.loads(run("codecs", "--config", path, "--json").stdout)
        self.assertEqual(
            [(row["layer"], row["k"], row["v"]) for row in rows],
            [(0, "int-8", "f16"), (1, "int-8", "f16")],
        )
        self.assertEqual(
            [(row["true_bits_k"], row["true_bits_v"]) for row in rows], 2 * [(8.5, 16)]
        )
        done = run("codecs", "--config", path)
        self.assertIn("codec bits   12.250\n", done.stdout)
        self.assertIn("model        tested\n", done.stdout)

    def test_calibration_beside_the_model_must_be_one(self):
        model = pathlib.Path(self.folder.name) / "model.gguf"
        model.write_text("weights")
        (pathlib.Path(self.folder.name) / "model.kvcal").write_text("no calibration")
        done = run("exec", self.server, "-m", model)
        self.assertEqual(done.returncode, OK)
        self.assertIn("model.kvcal is not used: this is not a calibration file", done.stderr)
        done = run("exec", "-k", "int-8", self.server, "-m", model)
        self.assertEqual((done.returncode, done.stderr), (OK, ""))

    def test_protected_layers_and_calibration(self):
        env = self.environment("--protect", "2", "--protect-codec", "int-8")
        self.assertEqual((env["KVANT_PROTECT"], env["KVANT_PROTECT_CODEC"]), ("2", "int-8"))
        env = self.environment(KVANT_PROTECT="3")
        self.assertEqual((env["KVANT_PROTECT"], env.get("KVANT_PROTECT_CODEC")), ("3", None))
        self.assertNotIn("KVANT_PROTECT", self.environment())
        for options in (
            ["--protect", "-1"],
            ["--protect-codec", "f8"],
            ["--calibration", "/nowhere/at.all"],
        ):
            done = run("exec", *options, "--", self.server)
            self.assertEqual((done.returncode, done.stdout), (USAGE, ""), options)
            self.assertIn(options[0], done.stderr)
            self.assertIn("hint:", done.stderr)

    def test_flags_are_added_behind_the_given_ones(self):
        arguments, _ = self.arguments("-m", "a model.gguf")
        self.assertEqual(
            arguments, ["-m", "a model.gguf", "--device", "KVANT", "-ngl", "99", "-fa", "on"]
        )

    def test_given_flags_stay_in_any_spelling(self):
        for given in (
            ["--device", "KVANT", "-ngl", "10", "-fa", "auto"],
            ["-dev", "KVANT", "--gpu-layers", "10", "--flash-attn", "auto"],
            ["-dev", "KVANT,CUDA0", "--n-gpu-layers", "10", "--flash-attn", "auto"],
        ):
            self.assertEqual(self.arguments(*given)[0], given)

    def test_flags_from_llama_variables_stay(self):
        arguments, _ = self.arguments(LLAMA_ARG_N_GPU_LAYERS="10")
        self.assertEqual(arguments, ["--device", "KVANT", "-fa", "on"])

    def test_accel_leaves_the_cache_alone(self):
        env = self.environment("--accel", KVANT_K="nonsense", KVANT_PROTECT="2")
        self.assertEqual(env["KVANT_ACCEL"], "1")
        self.assertTrue(pathlib.Path(env["GGML_BACKEND_PATH"]).samefile(PLUGIN))
        self.assertFalse({"KVANT_K", "KVANT_V", "KVANT_PROTECT"} & set(env))
        self.assertNotIn("KVANT_ACCEL", self.environment(KVANT_ACCEL="1"))

    def test_accel_adds_its_own_flags(self):
        done = run("exec", "--accel", "--", self.server, "-ctk", "q8_0", "-ctv", "q8_0")
        self.assertEqual(done.stdout.split(), "-ctk q8_0 -ctv q8_0 -fa on -ot none=CPU".split())
        self.assertIn("kvant: attention on llama.cpp's own cache", done.stderr)
        self.assertEqual(run("exec", "--accel", "--quiet", "--", self.server).stderr, "")
        done = run(
            "exec", "--accel", "--", self.server, "-fa", "auto", LLAMA_ARG_OVERRIDE_TENSOR="x=CPU"
        )
        self.assertEqual(done.stdout.split(), ["-fa", "auto"])
        cuda = (
            pathlib.Path(self.server).parent / "libggml-cuda.so"
        )  # a build that loads back ends from files
        cuda.touch()
        self.addCleanup(cuda.unlink)
        done = run("exec", "--accel", "--", self.server, "-ctk", "q8_0", "-ctv", "q8_0")
        self.assertEqual(
            done.stdout.split(), "-ctk q8_0 -ctv q8_0 --device KVANT -ngl 99 -fa on".split()
        )

    def test_accel_has_no_codecs(self):
        for options in (
            ["-k", "int-8"],
            ["-v", "int-8"],
            ["--protect", "2"],
            ["--calibration", "x"],
            ["--preset", "small"],
            ["--config", "x"],
        ):
            done = run("exec", "--accel", *options, "--", self.server)
            self.assertEqual((done.returncode, done.stdout), (USAGE, ""), options)
            self.assertIn("--accel", done.stderr)
            self.assertIn("hint:", done.stderr)

    def test_another_device_is_pointed_out(self):
        arguments, stderr = self.arguments("--device", "CUDA0")
        self.assertEqual(arguments, ["--device", "CUDA0", "-ngl", "99", "-fa", "on"])
        self.assertIn("the cache will not be kvant's", stderr)

    def test_what_would_leave_the_cache_uncompressed_is_said(self):
        for given, environment, word in (
            (["-ngl", "0"], {}, "-ngl 0"),
            (["--n-gpu-layers", "0"], {}, "-ngl 0"),
            ([], {"LLAMA_ARG_N_GPU_LAYERS": "0"}, "-ngl 0"),
            (["-nkvo"], {}, "-nkvo"),
            (["--no-kv-offload"], {}, "-nkvo"),
            ([], {"LLAMA_ARG_NO_KV_OFFLOAD": "1"}, "-nkvo"),
            ([], {"LLAMA_ARG_KV_OFFLOAD": "0"}, "-nkvo"),
        ):
            stderr = self.arguments(*given, **environment)[1]
            self.assertIn(f"with {word} no layer has kvant's cache", stderr, given)
            self.assertIn("hint:", stderr)
        for given in ([], ["-ngl", "99"], ["-ngl", "5"]):
            self.assertEqual(self.arguments(*given)[1], "", given)

    def test_flash_attention_off_is_refused(self):
        for options in ([], ["--accel"]):
            for given, environment in (
                (["-fa", "off"], {}),
                (["--flash-attn", "0"], {}),
                ([], {"LLAMA_ARG_FLASH_ATTN": "off"}),
            ):
                done = run("exec", *options, "--", self.server, *given, **environment)
                self.assertEqual((done.returncode, done.stdout), (USAGE, ""), given)
                self.assertIn("-fa off", done.stderr)
        self.assertEqual(self.arguments("-fa", "auto")[1], "")

    def test_another_cache_type_names_the_flag(self):
        for given, environment, flag in (
            (["-ctk", "q8_0"], {}, "-ctk q8_0"),
            (["--cache-type-v", "q4_0"], {}, "-ctv q4_0"),
            ([], {"LLAMA_ARG_CACHE_TYPE_K": "f32"}, "-ctk f32"),
        ):
            done = run("exec", "--", self.server, *given, **environment)
            self.assertEqual((done.returncode, done.stdout), (USAGE, ""), given)
            for word in (flag, "--accel"):
                self.assertIn(word, done.stderr)
        self.assertEqual(self.arguments("-ctk", "f16", "-ctv", "f16")[1], "")

    def test_the_dashes_are_optional(self):
        done = run("exec", "-k", "int-8", self.server, "-v")
        self.assertEqual(done.stdout.splitlines()[0], "-v")

    def test_exit_code_is_the_programs(self):
        self.assertEqual(run("exec", "sh", "-c", "exit 42").returncode, 42)

    def test_missing_program(self):
        done = run("exec", "no-such-llama-server")
        self.assertEqual(done.returncode, NOT_FOUND)
        self.assertIn("no-such-llama-server", done.stderr)
        self.assertIn("hint:", done.stderr)

    def test_program_that_may_not_run(self):
        path = pathlib.Path(self.folder.name) / "llama-text"
        path.write_text("not a program")
        self.assertEqual(run("exec", path).returncode, RUNTIME)

    def test_no_program(self):
        self.assertEqual(run("exec", "-k", "int-8").returncode, USAGE)

    def test_bad_specs_stop_before_the_program_starts(self):
        for options in (
            ["-k", "nonsense"],
            ["-k", "turboquant-99"],
            ["-k", "int-8", "-v", "int-8:group="],
            ["-k", "int-8:nosuch=1"],
            ["-k", ""],
        ):
            done = run("exec", *options, "--", self.server)
            self.assertEqual((done.returncode, done.stdout), (USAGE, ""), options)
            self.assertIn(options[-1] or "-k", done.stderr)

    def test_what_was_meant_is_suggested(self):
        for options, said in (
            (["-k", "turbquant-4"], "did you mean 'turboquant-4'?"),
            (["-k", "TurboQuant-4:scale=norm"], "did you mean 'turboquant-4:scale=norm'?"),
            (["-k", "int-8", "-v", "trelis-3"], "did you mean 'trellis-3'?"),
            (["-k", "turboquant4"], "did you mean 'turboquant-4'?"),
            (["-k", "balanced"], "did you mean --preset balanced?"),
            (["-k", "q4_0"], "q4_0 is a type of llama.cpp's own cache: use --stock q4_0"),
            (["-k", "iq4_nl"], "iq4_nl is a type of llama.cpp's own cache"),
            (["--preset", "Balance"], "did you mean 'balanced'?"),
        ):
            done = run("exec", *options, "--", self.server)
            self.assertEqual((done.returncode, done.stdout), (USAGE, ""), options)
            self.assertIn(f"  hint: {said}", done.stderr)
        for options in (["-k", "int-9"], ["-k", "nonsense"], ["--preset", "large"]):
            self.assertNotIn("did you mean", run("exec", *options, "--", self.server).stderr)

    def test_bad_spec_from_the_environment(self):
        self.assertEqual(run("exec", self.server, KVANT_K="nonsense").returncode, USAGE)

    def test_missing_plugin(self):
        done = run("exec", self.server, KVANT_PLUGIN="/nowhere.so")
        self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""))


@unittest.skipUnless(SRC, "built without llama.cpp's headers")
class LlamaErrors(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.file = pathlib.Path(self.folder.name) / "file"
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
        model = pathlib.Path(self.folder.name) / "model.gguf"
        model.write_text("GGUF, but not really")
        (pathlib.Path(self.folder.name) / "model.kvcal").write_text("no calibration")
        out = pathlib.Path(self.folder.name) / "out"
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
            ["run", "-p", "x", "-m", self.file, "--runtime", self.folder.name],
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
        good = pathlib.Path(self.folder.name) / "model.kvant"
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
        done = run("exec", "-k", "int-8", "env", KVANT_PLUGIN="/nowhere.so")
        self.assertEqual(done.returncode, RUNTIME)
        self.assertIn("KVANT_PLUGIN=/nowhere.so", done.stderr)


if __name__ == "__main__":
    unittest.main()
