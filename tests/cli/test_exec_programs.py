"""kvant exec with programs whose names do not begin with llama: a launcher, a shell, a binding."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import unittest

import ollama_like
from testing import KVANT, LIB, MODEL, command, program, run, temporary_folder

HERE = pathlib.Path(__file__).resolve().parent
# llama.cpp's libraries with back ends linked in.
LINKED = os.environ.get("KVANT_LINKED", "")
# A back end "CUDA" without a GPU (tests/integration/mock_cuda.c).
CUDA = os.environ.get("KVANT_CUDA_MOCK", "")
SMALL = f'exec {sys.executable} -B {HERE}/small_server.py {LIB} "$@"'
LAYERS = "30 of 30 layers"
REFUSED = "flash attention is off, so llama.cpp stores values transposed"


def lines_of(stderr):
    """kvant's lines without the line about flags, which every program here gets."""
    lines = [line for line in stderr.splitlines() if line.startswith("kvant: ")]
    return [line for line in lines if "does not begin with llama" not in line]


def script_of_the_page():
    """The script without its first line, which program() writes."""
    page = HERE.parent.parent / "docs" / "start" / "ollama.md"
    return textwrap.dedent(re.search(r"^ +#!/bin/sh\n((?: +.*\n)+)", page.read_text(), re.M)[1])


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = temporary_folder(self.addCleanup)

    def assertCompressed(self, done):
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Paris", done.stdout)
        lines = lines_of(done.stderr)
        self.assertEqual(len(lines), 1, done.stderr)
        self.assertIn(LAYERS, lines[0])


class Launcher(Case):
    def setUp(self):
        super().setUp()
        program(self.folder, "llama-server", SMALL)

    def launch(self, folder, **environment):
        launcher = [sys.executable, "-B", HERE / "ollama_like.py", folder, MODEL]
        return run("exec", "--", *launcher, **environment)

    def servers(self):
        """Folders with a llama-server: the test's own, and llama.cpp's if it is built."""
        return [self.folder, *([LIB] if os.path.exists(os.path.join(LIB, "llama-server")) else [])]

    def test_a_server_that_a_launcher_starts_is_compressed(self):
        for folder in self.servers():
            with self.subTest(folder):
                self.assertCompressed(self.launch(folder))

    def test_flash_attention_off_is_refused(self):
        """As Ollama would start it without exec's instructions."""
        for folder in self.servers():
            with self.subTest(folder):
                done = self.launch(folder, OLLAMA_FLASH_ATTENTION="0")
                self.assertNotEqual(done.returncode, 0)
                self.assertIn("the server ended with 1", done.stderr)
                self.assertIn(REFUSED, done.stderr)

    def test_a_shell_that_starts_a_server(self):
        """Only with variables. The shell is another program, so that no word begins with llama."""
        for folder in self.servers():
            with self.subTest(folder):
                port = ollama_like.free_port()
                script = f'"$0"/llama-server --model "$1" --port {port} -c 512; exit $?'
                with subprocess.Popen(
                    command("exec", "--", "sh", "-c", script, folder, MODEL),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                ) as server:
                    try:
                        ollama_like.wait_until_ready(server, port)
                        self.assertIn("Paris", ollama_like.complete(port))
                    finally:
                        os.killpg(server.pid, signal.SIGTERM)
                    lines = lines_of(server.communicate()[1])
                self.assertEqual(len(lines), 1, lines)
                self.assertIn(LAYERS, lines[0])


@unittest.skipUnless(CUDA, "the mock of CUDA is not built")
class Nvidia(Case):
    def test_a_script_in_the_place_of_llama_server(self):
        """The script that the page shows. Ollama itself is not started by kvant exec."""
        program(self.folder, "llama-server.real", SMALL)
        program(self.folder, "llama-server", script_of_the_page())
        launcher = [sys.executable, "-B", HERE / "ollama_like.py", self.folder, MODEL, CUDA]
        path = f"{pathlib.Path(KVANT).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            [str(word) for word in launcher],
            capture_output=True,
            text=True,
            env=dict(os.environ, PATH=path, KVANT_VERBOSE="1"),
            timeout=300,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Paris", done.stdout)
        self.assertIn("kvant: KVANT0 is CUDA0\n", done.stderr)
        self.assertIn(LAYERS, done.stderr)


class Binding(Case):
    """The answer is right, or there is one line of error; the program never aborts."""

    def run_binding(self, folder, *flags, **environment):
        binding = [sys.executable, "-B", HERE / "binding.py", folder, MODEL]
        return run("exec", "--", *binding, *flags, **environment)

    def assertSays(self, done, status, text):
        self.assertEqual(done.returncode, status, done.stderr)
        lines = lines_of(done.stderr)
        self.assertEqual(len(lines), 1, done.stderr)
        self.assertIn(text, lines[0])

    def test_back_ends_in_files(self):
        self.assertCompressed(self.run_binding(LIB, "--load"))
        self.assertSays(self.run_binding(LIB, "--load", "--flash-attn", "off"), 3, REFUSED)
        done = self.run_binding(LIB, "--load", "--no-device")
        self.assertSays(done, 0, "no context was made on kvant's device")
        done = self.run_binding(LIB, "--load", "--layers", "0")
        self.assertSays(done, 0, "no layer has a compressed cache")
        done = self.run_binding(LIB, "--load", KVANT_PRESET="huge")
        self.assertEqual((done.returncode, len(lines_of(done.stderr))), (2, 1), done.stderr)

    def test_what_the_plug_in_refuses_is_told_once(self):
        done = self.run_binding(LIB, "--load", KVANT_HOST_THREADS="2")
        self.assertSays(done, 0, "KVANT_HOST_THREADS")
        self.assertIn("Paris", done.stdout)

    @unittest.skipUnless(LINKED, "KVANT_TEST_ARCHS names libraries with linked back ends")
    def test_back_ends_that_are_linked_in(self):
        linked = "ggml's back ends are linked into the program's libraries"
        for flags in ([], ["--flash-attn", "off"]):
            done = self.run_binding(LINKED, *flags)
            self.assertSays(done, 0, linked)
            self.assertIn("Paris", done.stdout)
        self.assertCompressed(self.run_binding(LINKED, "--load"))
        self.assertSays(self.run_binding(LINKED, "--load", "--flash-attn", "off"), 3, REFUSED)


if __name__ == "__main__":
    unittest.main()
