"""The command and the plug-in for Windows under Wine, in a folder whose name has a space and
letters outside ASCII. KVANT_DIST is the unpacked zip file, KVANT_RUNTIME_DLLS a folder of
llama.cpp's libraries, KVANT_ARGUMENTS the program arguments.exe."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import time
import unittest

NAME = "mit Leerzeichen, äöü и Ж"
PROMPT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"
SECONDS = 900  # a token takes npm's build 1 to 2 seconds, because it is compiled for debugging


def windows(path):
    """The path as a program under Wine sees it."""
    return "Z:" + str(path)


class Windows(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.temporary.name) / NAME
        shutil.copytree(os.environ["KVANT_DIST"], cls.folder / "kvant")
        cls.kvant = cls.folder / "kvant" / "bin" / "kvant.exe"
        cls.model = cls.folder / "Modell ß.gguf"
        os.symlink(os.environ["KVANT_TEST_MODEL"], cls.model)
        cls.arguments = cls.folder / "llama-Wörter.exe"
        shutil.copy(os.environ["KVANT_ARGUMENTS"], cls.arguments)

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def run_kvant(self, *words, **variables):
        done = subprocess.run(
            ["wine", self.kvant, *words],
            env={**os.environ, **variables},
            capture_output=True,
            timeout=SECONDS,
        )
        return done.returncode, done.stdout.decode(), done.stderr.decode()

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
            *("run", "-m", windows(self.folder / "fehlt ß.gguf"), "-p", "x"), KVANT_RUNTIME="Z:/"
        )
        self.assertEqual(status, 1)
        self.assertEqual(
            said.splitlines()[0],
            f"kvant: model {windows(self.folder)}/fehlt ß.gguf: No such file or directory",
        )

    def test_commands_in_python_are_refused(self):
        for name in ("report", "tune"):
            status, text, said = self.run_kvant(name)
            self.assertEqual((status, text), (1, ""))
            self.assertIn(f"kvant: {name}: this command is part of kvant's Python package", said)

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
        for name in ("llama-Wörter", "llama-Wörter.exe"):
            status, text, said = self.run_kvant(
                *("exec", "--quiet", "-k", "int-8", "--", name, "-v", "GGML_BACKEND_PATH"),
                WINEPATH=windows(self.folder),
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
            ["wine", self.kvant, "exec", "--quiet", "--", windows(self.arguments)]
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
