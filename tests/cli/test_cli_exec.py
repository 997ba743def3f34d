"""kvant exec without a model: how it queries the program, words before the program, refused
options.
"""

import ctypes
import pathlib
import shutil
import struct
import sys
import time
import unittest

from testing import PLUGIN, command, program, run, temporary_folder

OK, USAGE = 0, 2
ADDED = ["--device", "KVANT", "-ngl", "99", "-fa", "on"]


def text(s):
    return struct.pack("<Q", len(s)) + s.encode()


def gguf(n_layers, architecture="llama"):
    """The header of a model's file. Lists stand before the number of layers."""
    words = text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 300) + 300 * text("word")
    numbers = text("some.numbers") + struct.pack("<IIQ", 9, 6, 1000) + 4000 * b"\0"
    return (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 5)
        + words
        + numbers
        + text("clip.block_count")
        + struct.pack("<II", 4, 7)
        + text("general.architecture")
        + struct.pack("<I", 8)
        + text(architecture)
        + text(f"{architecture}.block_count")
        + struct.pack("<II", 4, n_layers)
    )


def opens(*names):
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False


CUDA = opens("libcuda.so.1")
OTHER_GPUS = not CUDA and opens("libvulkan.so.1", "libamdhip64.so", "libze_loader.so.1")


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = temporary_folder(self.addCleanup)

    def model(self, n_layers=30, size=0, name="model.gguf"):
        path = self.folder / name
        with open(path, "wb") as file:
            file.write(gguf(n_layers))
            if size:
                file.truncate(size)
        return path

    def exec(self, *words, options=(), **environment):
        """The program's arguments, and exec's messages."""
        done = run("exec", *options, "--", *words, **environment, code=OK)
        return done.stdout.splitlines(), done.stderr


@unittest.skipUnless(PLUGIN, "the plug-in is not built")
class Asked(Case):
    def test_a_program_that_does_not_end(self):
        server = program(
            self.folder, "llama-server", '[ "$1" = --list-devices ] && sleep 1000; echo "$@"'
        )
        start = time.monotonic()
        arguments, said = self.exec(server)
        self.assertEqual(arguments, [" ".join(ADDED)])
        self.assertIn("--list-devices gave no list within 10 seconds", said)
        self.assertLess(time.monotonic() - start, 100)

    def test_the_program_is_asked_as_it_will_run(self):
        server = program(
            self.folder,
            "llama-server",
            '[ "$1" = --list-devices ] && echo "$A $GGML_BACKEND_PATH" >> "$OUT"; exit 0',
        )
        out = self.folder / "asked"
        self.exec("env", "A=1", server, OUT=str(out))
        asked = out.read_text().split()
        self.assertEqual(asked[0], "1")
        self.assertTrue(pathlib.Path(asked[1]).samefile(PLUGIN))


@unittest.skipUnless(PLUGIN, "the plug-in is not built")
class Words(Case):
    """Other programs that start llama.cpp's programs."""

    def setUp(self):
        super().setUp()
        self.server = program(self.folder, "llama-server", 'printf "%s\\n" "$@"')

    def test_flags_stand_behind_the_program(self):
        for words in (
            ["env", "A=1"],
            ["nice", "-n", "5"],
            ["nohup"],
            ["timeout", "60"],
            ["stdbuf", "-oL"],
            ["setsid", "-w"],
            ["taskset", "-c", "0"],
            ["ionice", "-c", "3"],
            ["chrt", "-b", "0"],
            ["numactl", "--all"],
            ["xargs"],
            ["sh", "-c", 'exec "$0" "$@"'],
            ["env", "nice", "timeout", "60"],
        ):
            if shutil.which(words[0]) is None:
                continue
            arguments, said = self.exec(*words, self.server, "-m", "x")
            self.assertEqual((arguments, said), ([*ADDED, "-m", "x"], ""), words)
            arguments, said = self.exec(*words, self.server, "-ctk", "q8_0", options=["--accel"])
            self.assertEqual(arguments, ["-fa", "on", "-ot", "none=CPU", "-ctk", "q8_0"], words)

    def test_the_end_may_be_the_other_programs(self):
        arguments, _ = self.exec(
            "find", self.folder, "-name", "llama-server", "-exec", self.server, "{}", ";"
        )
        self.assertEqual(arguments, [*ADDED, str(self.server)])

    def test_a_program_on_the_path(self):
        path = f"{self.folder}:/usr/bin:/bin"
        self.assertEqual(self.exec("nice", "llama-server", PATH=path), (ADDED, ""))

    def test_one_program_with_commands(self):
        llama = program(self.folder, "llama", 'printf "%s\\n" "$@"')
        self.assertEqual(
            self.exec("nice", llama, "serve", "-m", "x")[0], ["serve", *ADDED, "-m", "x"]
        )
        self.assertEqual(self.exec(llama, "serve", "-m", "x")[0], ["serve", "-m", "x", *ADDED])

    def test_the_programs_options_are_checked(self):
        for words in (["nice"], ["env", "A=1", "nice", "-n", "3"]):
            for given in (["-ctk", "q8_0"], ["-fa", "off"], ["-ctvd", "q4_0"]):
                done = run("exec", "--", *words, self.server, *given)
                self.assertEqual((done.returncode, done.stdout), (USAGE, ""), given)
                self.assertIn(given[0], done.stderr)
            arguments, said = self.exec(*words, self.server, "-ngl", "0", "--device", "KVANT")
            self.assertEqual(arguments, ["-fa", "on", "-ngl", "0", "--device", "KVANT"])
            self.assertIn("with -ngl 0 no layer has kvant's cache", said)
        done = run("exec", "env", "LLAMA_ARG_CACHE_TYPE_K=q8_0", self.server)
        self.assertEqual((done.returncode, done.stdout), (USAGE, ""))
        self.assertEqual(
            self.exec("env", "LLAMA_ARG_DEVICE=KVANT", self.server)[0], ["-ngl", "99", "-fa", "on"]
        )

    def test_options_of_the_other_program_are_its_own(self):
        """numactl -m 0 names no model, and -fa off before the program is no option of llama.cpp."""
        other = program(
            self.folder, "numactl", 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"'
        )
        model = self.folder / "model.gguf"
        model.write_text("weights")
        model.with_suffix(".kvcal").write_text("no calibration")
        arguments, said = self.exec(other, "-m", "0", "-fa", "off", "--", self.server, "-m", model)
        self.assertEqual(arguments, [*ADDED, "-m", str(model)])
        self.assertIn("model.kvcal is not used", said)

    def test_a_program_that_gets_no_flags_is_pointed_out(self):
        script = program(self.folder, "serve.sh", f'exec {self.server} "$@"')
        for words, out in (
            ([script, "-m", "x"], ["-m", "x"]),
            (["sh", "-c", f"{self.server} -m x"], ["-m", "x"]),
            (["true"], []),
        ):
            arguments, said = self.exec(*words)
            self.assertEqual(arguments, out)
            self.assertIn(f"'{pathlib.Path(words[0]).name}' does not begin with llama", said)
            device = "OVERRIDE_TENSOR=none=CPU" if OTHER_GPUS else "DEVICE=KVANT"
            self.assertIn(f"LLAMA_ARG_{device} LLAMA_ARG_N_GPU_LAYERS=99", said)
            self.assertIn("take all devices" if OTHER_GPUS else "weights stay on the CPU", said)
            self.assertEqual(self.exec(*words, options=["--quiet"])[1], "")
        said = self.exec("true", options=["--accel"])[1]
        self.assertIn("LLAMA_ARG_OVERRIDE_TENSOR=none=CPU LLAMA_ARG_FLASH_ATTN=on", said)

    def test_variables_for_a_program_that_another_one_starts(self):
        """Starts llama-server as Ollama does: with its own arguments and the user's environment."""
        names = ["LLAMA_ARG_DEVICE", "LLAMA_ARG_N_GPU_LAYERS", "LLAMA_ARG_FLASH_ATTN",
                 "LLAMA_ARG_OVERRIDE_TENSOR", "OLLAMA_FLASH_ATTENTION"]  # fmt: skip

        def values(*words, options=(), **environment):
            lines = self.exec(*words, options=options, **environment)[0]
            given = dict(line.split("=", 1) for line in lines if "=" in line)
            return [given.get(name) for name in names]

        device, tensors = (None, "none=CPU") if OTHER_GPUS else ("KVANT", None)
        self.assertEqual(values("env"), [device, "99", "on", tensors, "1"])
        given = values("env", LLAMA_ARG_DEVICE="KVANT0")
        self.assertEqual(given, ["KVANT0", "99", "on", tensors, "1"])
        # Any library can stand for the one by which programs use other GPUs.
        shutil.copy(PLUGIN, self.folder / "libvulkan.so.1")
        given = values("env", LD_LIBRARY_PATH=str(self.folder))
        expected = ["KVANT", "99", "on", None, "1"] if CUDA else [None, "99", "on", "none=CPU", "1"]
        self.assertEqual(given, expected)
        self.assertEqual(values("env", options=["--accel"]), [None, None, "on", "none=CPU", "1"])
        server = program(self.folder, "llama-env", "env")
        self.assertEqual(values(server), [None] * 5)

    def test_another_back_end_is_left_to_the_plug_in(self):
        """ggml reads one path. An exec inside an exec finds the plug-in's path there."""

        def values(*words, **environment):
            lines = self.exec(*words, **environment)[0]
            given = dict(line.split("=", 1) for line in lines if "=" in line)
            return given["GGML_BACKEND_PATH"], given.get("KVANT_BACKEND_PATH")

        plugin = str(pathlib.Path(PLUGIN).resolve())
        installed = f"/usr/lib/{pathlib.Path(PLUGIN).name}"
        for path, kept in ((None, None), ("", None), (installed, None), ("/a/b.so", "/a/b.so")):
            environment = {} if path is None else {"GGML_BACKEND_PATH": path}
            for words in (["env"], command("exec", "--", "env")):
                self.assertEqual(values(*words, **environment), (plugin, kept))

    def test_other_words_that_begin_with_llama(self):
        """A model that may be executed, a folder, a Python script, a missing file."""
        model = self.folder / "llama-3.gguf"
        model.write_bytes(gguf(30))
        model.chmod(0o755)
        (self.folder / "llama.cpp").mkdir()
        script = program(self.folder, "llama_serve.py", "")
        for word in (model, self.folder / "llama.cpp", script, "llama-user"):
            arguments, said = self.exec("echo", "-m", word, "-x")
            self.assertEqual(arguments, [f"-m {word} -x"])
            self.assertIn("'echo' does not begin with llama", said)


@unittest.skipUnless(PLUGIN, "the plug-in is not built")
class Types(Case):
    NAMES = {
        "-ctk": ["--cache-type-k", "--cache_type_k", "LLAMA_ARG_CACHE_TYPE_K"],
        "-ctv": ["--cache-type-v", "--cache-type_v", "LLAMA_ARG_CACHE_TYPE_V"],
        "-ctkd": [
            "--cache-type-k-draft",
            "--spec-draft-type-k",
            "--cache_type_k_draft",
            "LLAMA_ARG_CACHE_TYPE_K_DRAFT",
            "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
        ],
        "-ctvd": [
            "--cache-type-v-draft",
            "--spec-draft-type-v",
            "--spec_draft_type_v",
            "LLAMA_ARG_CACHE_TYPE_V_DRAFT",
            "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
        ],
    }

    def done(self, name, kind, *more):
        server = program(self.folder, "llama-server", 'printf "%s\\n" "$@"')
        variable = {name: kind} if name.startswith("LLAMA") else {}
        return run("exec", "--", server, *([] if variable else [name, kind]), *more, **variable)

    def test_every_spelling_is_refused_and_named(self):
        for short, names in self.NAMES.items():
            for name in [short, *names]:
                done = self.done(name, "q8_0")
                self.assertEqual((done.returncode, done.stdout), (USAGE, ""), name)
                self.assertIn(f"exec: {short} q8_0", done.stderr)
                self.assertIn(f"leave {name} out", done.stderr)
                self.assertEqual(self.done(name, "f16").returncode, OK)

    def test_the_last_one_counts(self):
        self.assertEqual(self.done("-ctk", "q8_0", "--cache-type-k", "f16").returncode, OK)
        self.assertEqual(self.done("-ctk", "f16", "-ctk", "q8_0").returncode, USAGE)
        self.assertEqual(self.done("LLAMA_ARG_CACHE_TYPE_K", "q8_0", "-ctk", "f16").returncode, OK)
        self.assertEqual(self.done("-fa", "off", "-fa", "on").returncode, OK)
        self.assertEqual(self.done("--flash_attn", "off").returncode, USAGE)

    def test_a_draft_elsewhere_has_any_type(self):
        for more in (
            ["-devd", "none"],
            ["--device-draft", "CUDA0"],
            ["-ngld", "0"],
            ["--spec-draft-ngl", "0"],
        ):
            self.assertEqual(self.done("-ctkd", "q8_0", *more).returncode, OK)
        self.assertEqual(self.done("-ctkd", "q8_0", "-devd", "KVANT").returncode, USAGE)
        self.assertEqual(self.done("-ctk", "q8_0", "-devd", "none").returncode, USAGE)


@unittest.skipUnless(PLUGIN, "the plug-in is not built")
class Variables(Case):
    def test_what_chose_wrongly_is_named(self):
        """exec sets a variable if the user set the variable, and the option if the user gave the
        option.
        """
        for option, variable, value in (
            ("--preset", "KVANT_PRESET", "huge"),
            ("--calibration", "KVANT_CALIBRATION", "/no/where"),
            ("--config", "KVANT_CONFIG", "/no/where"),
            ("-k", "KVANT_K", "nonsense"),
            ("-v", "KVANT_V", "nonsense"),
            ("--protect-codec", "KVANT_PROTECT_CODEC", "nonsense"),
        ):
            for options, environment, named, other in (
                ([], {variable: value}, variable, f"{option} "),
                ([option, value], {}, option, variable),
            ):
                done = run("exec", *options, "--", sys.executable, **environment)
                self.assertEqual((done.returncode, done.stdout), (USAGE, ""), (option, options))
                first = done.stderr.splitlines()[0]
                self.assertTrue(first.startswith(f"kvant: {named}"), first)
                self.assertNotIn(other, first)
        done = run("exec", "--", sys.executable, KVANT_CONFIG="x", KVANT_PROTECT="1")
        self.assertIn("exec: KVANT_CONFIG=x sets", done.stderr)


if __name__ == "__main__":
    unittest.main()
