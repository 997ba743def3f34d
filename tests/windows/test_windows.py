"""The command and the plug-in for Windows (under Wine on other systems) in a folder whose name has
a space and letters outside ASCII.

KVANT_DIST is the unpacked zip file, KVANT_RUNTIME_DLLS a folder of llama.cpp's libraries,
KVANT_PROGRAMS one with arguments.exe and interrupt.exe, KVANT_PYTHON_DLLS one of a Python for
Windows with NumPy, in which the wheel is installed."""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAME = "mit Leerzeichen, äöü и Ж"
PROMPT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"
INTERRUPTED = 130
SECONDS = 900  # a token takes npm's build 1 to 2 seconds, because it is compiled for debugging
WINE = [] if os.name == "nt" else ["wine"]


def windows(path):
    """The path as the program sees it."""
    return pathlib.Path(path).as_posix() if os.name == "nt" else f"Z:{path}"


class Windows(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.temporary.name).resolve() / NAME
        shutil.copytree(os.environ["KVANT_DIST"], cls.folder / "kvant")
        cls.kvant = cls.folder / "kvant" / "bin" / "kvant.exe"
        cls.model = cls.folder / "Modell ß.gguf"
        shutil.copy(os.environ["KVANT_TEST_MODEL"], cls.model)
        cls.arguments = cls.folder / "llama-Wörter.exe"
        programs = pathlib.Path(os.environ["KVANT_PROGRAMS"])
        shutil.copy(programs / "arguments.exe", cls.arguments)
        cls.interrupt = programs / "interrupt.exe"
        cls.python = pathlib.Path(os.environ["KVANT_PYTHON_DLLS"]) / "python.exe"

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def run_program(self, *words, **variables):
        done = subprocess.run(
            [*WINE, *words],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=SECONDS,
        )
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    def run_kvant(self, *words, **variables):
        return self.run_program(self.kvant, *words, **variables)

    def press_ctrl_c(self, text, *words, program=None, **variables):
        """Runs a command until its output has the text, and presses Ctrl-C. Returns its exit
        status and its output.
        """
        output = self.folder / "Ausgabe.txt"
        command = subprocess.list2cmdline([windows(program or self.kvant), *words])
        status, printed, said = self.run_program(
            self.interrupt, windows(output), text, COMMAND=command, **variables
        )
        # interrupt.exe says nothing, and the command writes to the file. Any output here is Wine's,
        # whose service for drivers may crash when the console ends.
        self.assertEqual(status, 0, said)
        return int(printed, 16), output.read_text(encoding="utf-8")

    def generate(self, *cache):
        status, text, said = self.run_kvant(
            *("run", "--runtime", windows(os.environ["KVANT_RUNTIME_DLLS"]), "--raw"),
            *("-m", windows(self.model), "-t", "2", "-n", "3", "-p", PROMPT, *cache),
        )
        self.assertEqual(status, 0, said)
        return text, said

    def test_version(self):
        status, text, said = self.run_kvant("--version")
        self.assertEqual((status, said), (0, ""))
        self.assertTrue(text.startswith("kvant ") and text.endswith("\n") and "\r" not in text)

    def test_plugin_path(self):
        status, text, said = self.run_kvant("plugin-path")
        self.assertEqual((status, said), (0, ""))
        self.assertEqual(text, f"{windows(self.folder)}/kvant/lib/ggml-kvant.dll\n")

    def test_generates_the_same_text(self):
        """The plug-in computes attention of int-8 and balanced, llama.cpp that of f16. npm's build
        has assertions: one of them checks the sizes of tensors."""
        text, _ = self.generate("--stock", "f16")
        self.assertIn("Madrid", text)
        for cache in (("-k", "int-8"), ("--preset", "balanced")):
            with self.subTest(cache=cache):
                own, said = self.generate(*cache)
                self.assertEqual(own, text)
                self.assertIn("KV cache", said)

    def test_a_missing_model_is_named(self):
        status, _, said = self.run_kvant(
            *("run", "-m", windows(self.folder / "fehlt ß.gguf"), "-p", "x"),
            KVANT_RUNTIME=windows("/"),
        )
        self.assertEqual(status, 1)
        self.assertEqual(
            said.splitlines()[0],
            f"kvant: model {windows(self.folder)}/fehlt ß.gguf: No such file or directory",
        )

    def run_script(self, path, **variables):
        """The embeddable Python has not the script's folder on its path."""
        path = windows(path)
        code = (
            "import os, runpy, sys; path = sys.argv[1]; sys.argv[:] = [path];"
            "sys.path.insert(0, os.path.dirname(path)); runpy.run_path(path, run_name='__main__')"
        )
        return self.run_program(self.python, "-B", "-c", code, path, **variables)

    def test_the_package(self):
        """The wheel as a program uses it, and the package's own tests with the wheel's library."""
        status, text, said = self.run_script(ROOT / "scripts" / "check_wheel.py")
        self.assertEqual((status, text, said), (0, "", ""))
        library = windows(self.python.parent / "kvant" / "bin" / "libkvant.dll")
        for path in sorted((ROOT / "tests" / "python").glob("test_*.py")):
            # they need a shell, PyTorch, and a preloaded library
            if path.name in ("test_commands.py", "test_gpu.py", "test_no_memory.py"):
                continue
            with self.subTest(path.name):
                status, _, said = self.run_script(path, KVANT_LIBRARY=library)
                self.assertEqual(status, 0, said)
                self.assertRegex(said, r"Ran [1-9]\d* tests? in")
                print(path.name, said.splitlines()[-1], flush=True)

    def test_commands_in_python(self):
        """From the zip file with the Python of KVANT_PYTHON, and from the wheel."""
        words = ["bench", "distortion", "--quick", "-k", "int-8", "--json"]
        python = windows(self.python)
        status, text, said = self.run_kvant(*words, KVANT_PYTHON=python)
        self.assertEqual(status, 0, said)
        self.assertNotIn("\r", text)
        rows = json.loads(text)
        self.assertEqual([row["spec"] for row in rows], ["int-8"])
        status, text, said = self.run_program(self.python, "-m", "kvant", *words)
        self.assertEqual((status, json.loads(text)), (0, rows), said)
        for name in ("report", "tune"):
            status, text, said = self.run_kvant(name, "--help", KVANT_PYTHON=python)
            self.assertEqual((status, said), (0, ""))
            self.assertIn(f"usage: kvant {name} ", text)

    def test_a_missing_python_is_named(self):
        status, text, said = self.run_kvant("report", KVANT_PYTHON="C:/fehlt/python.exe")
        self.assertEqual((status, text), (1, ""))
        self.assertIn("kvant: report: cannot start C:/fehlt/python.exe: No such file", said)
        self.assertIn("KVANT_PYTHON names the interpreter", said)

    def test_ctrl_c_ends_a_generation(self):
        """The command ends in an orderly way: after the token it prints its numbers."""
        status, text = self.press_ctrl_c(
            "Madrid",
            *("run", "--runtime", windows(os.environ["KVANT_RUNTIME_DLLS"]), "--raw", "-t", "2"),
            *("-k", "int-8", "-m", windows(self.model), "-n", "500", "-p", PROMPT),
        )
        self.assertEqual(status, INTERRUPTED)
        self.assertRegex(text, r"answer \d+ tokens, .*; KV cache ")

    def calibrate(self):
        """A command that takes minutes."""
        runtime = windows(os.environ["KVANT_RUNTIME_DLLS"])
        words = "-f kvant:manual -n 2048 -c 32 -t 2 -m".split()
        return ["calibrate", "--runtime", runtime, *words, windows(self.model)]

    def test_ctrl_c_leaves_no_half_of_a_file(self):
        """An interrupted calibration keeps its work under another name, and says so."""
        self.assertFalse(self.model.with_suffix(".kvcal").exists())
        status, text = self.press_ctrl_c("left", *self.calibrate())
        self.assertEqual(status, INTERRUPTED, text)
        self.assertFalse(self.model.with_suffix(".kvcal").exists())

    def test_ctrl_c_is_the_programs(self):
        """The program gets the key and tidies up. exec waits for it, and ends as it ended."""
        status, text = self.press_ctrl_c(
            "bereit", "exec", "--quiet", "--", windows(self.arguments), "-c", "bereit", "-x", "7"
        )
        self.assertEqual(status, 7)
        self.assertIn("tidied up", text)

    def test_ctrl_c_in_a_command_in_python(self):
        """The command prints what is complete."""
        status, text = self.press_ctrl_c(
            *("remaining_s", "bench", "distortion", "-t", "needle", "-t", "octopus-1", "--json"),
            KVANT_PYTHON=windows(self.python),
        )
        self.assertEqual(status, INTERRUPTED, text)

    def test_ctrl_c_in_a_command_that_starts_another(self):
        """The command waits for the other one."""
        code = (
            "import sys; from kvant.commands import child, cli; cli.catch_interrupt();"
            "print('status', child.run(sys.argv[1:]).code)"
        )
        status, text = self.press_ctrl_c(
            *("left", "-c", code, *self.calibrate()),
            program=self.python,
            KVANT_COMMAND=windows(self.kvant),
        )
        self.assertEqual(status, 0, text)
        self.assertIn(f"status {INTERRUPTED}", text)

    def test_exec_passes_words_variables_and_status(self):
        words = [
            "a b",
            'say "x"',
            "back\\",
            'end\\"',
            "",
            "Жä",
            "%PATH%",
            "-x",
            "7",
            "-v",
            "KVANT_K",
        ]
        status, text, said = self.run_kvant(
            *("exec", "--quiet", "-k", "int-8", "--", windows(self.arguments), *words)
        )
        self.assertEqual(status, 7, said)
        lines = text.splitlines()
        self.assertEqual(lines[0], "int-8")
        self.assertEqual(lines[1 : len(words) + 1], [f"[{word}]" for word in words])
        self.assertIn("[KVANT]", lines)  # --device KVANT, because the name begins with llama

    def test_exec_finds_programs_on_path(self):
        path = {"WINEPATH": windows(self.folder)}  # Wine puts it before its own PATH
        if not WINE:
            path = {"PATH": f"{self.folder};{os.environ['PATH']}"}
        for name in ("llama-Wörter", "llama-Wörter.exe"):
            status, text, said = self.run_kvant(
                *("exec", "--quiet", "-k", "int-8", "--", name, "-v", "GGML_BACKEND_PATH"),
                **path,
            )
            self.assertEqual(status, 0, said)
            self.assertEqual(
                text.splitlines()[0], f"{windows(self.folder)}/kvant/lib/ggml-kvant.dll"
            )

    def test_exec_names_a_missing_program(self):
        status, _, said = self.run_kvant("exec", "--quiet", "--", "llama-fehlt")
        self.assertEqual(status, 127)
        self.assertIn("cannot start llama-fehlt: No such file or directory", said)

    def test_a_program_ends_with_exec(self):
        written = self.folder / "geschrieben"
        started = subprocess.Popen(
            [*WINE, self.kvant, "exec", "--quiet", "--", windows(self.arguments)]
            + ["-w", windows(written)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(600):
            if written.exists():
                break
            time.sleep(0.2)
        self.assertTrue(written.exists())
        started.kill()
        started.wait()
        time.sleep(3)
        size = written.stat().st_size
        time.sleep(3)
        self.assertEqual(written.stat().st_size, size)


if __name__ == "__main__":
    unittest.main(verbosity=2)
