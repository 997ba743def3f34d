"""kvant exec without a model: its options, settings files and errors. The tests look at the
environment and at the flags that the program gets.
"""

import json
import os
import pathlib
import unittest
import unittest.mock

import settings
from testing import PLUGIN, program, run, temporary_folder

OK, RUNTIME, USAGE, NOT_FOUND = 0, 1, 2, 127


@unittest.skipUnless(PLUGIN, "the plug-in is not built")
class Exec(unittest.TestCase):
    def setUp(self):
        self.folder = temporary_folder(self.addCleanup)
        self.server = program(self.folder, "llama-server", 'printf "%s\\n" "$@"')

    def environment(self, *arguments, **environment):
        done = run("exec", *arguments, "--", "env", **environment, code=OK)
        return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)

    def arguments(self, *given, **environment):
        done = run("exec", "-k", "turboquant-4", "--", self.server, *given, **environment, code=OK)
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

    def test_saved_states_are_chosen_unless_told_otherwise(self):
        self.assertEqual(self.environment()["KVANT_STATES"], "auto")
        self.assertEqual(self.environment(KVANT_STATES="rows")["KVANT_STATES"], "rows")
        self.assertNotIn("KVANT_STATES", self.environment("--accel"))

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
        path = self.folder / "model.kvant"
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
        model = self.folder / "model.gguf"
        model.write_text("weights")
        (self.folder / "model.kvcal").write_text("no calibration")
        done = run("exec", self.server, "-m", model, code=OK)
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
        done = run("exec", "no-such-llama-server", code=NOT_FOUND)
        self.assertIn("no-such-llama-server", done.stderr)
        self.assertIn("hint:", done.stderr)

    def test_program_that_may_not_run(self):
        path = self.folder / "llama-text"
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


if __name__ == "__main__":
    unittest.main()
