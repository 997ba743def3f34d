"""kvant exec with programs that open a model and do not load the plug-in, without a real model."""

import concurrent.futures
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from test_cli_exec import Case
from testing import PLUGIN, command, program

HERE = pathlib.Path(__file__).resolve().parent
SEEN = "wait_until_seen(mark)"


@unittest.skipUnless(PLUGIN, "the plug-in is not built")
class Watch(Case):
    """exec prints one line at the end about a program that opened a model."""

    STATIC = "ggml was not loaded: this program has ggml linked in"
    LINKED = "ggml's back ends are linked into the program's libraries"
    ELSEWHERE = "no context was made on kvant's device"

    def setUp(self):
        super().setUp()
        self.gguf = self.model()
        self.library = self.folder / "libggml-base.so.0"
        self.library.write_bytes(4096 * b"g")

    def python(self, *lines, mark=None):
        """A program that ends after exec has looked at it. mark: the word that starts it."""
        handle, path = tempfile.mkstemp(".py", dir=self.folder)
        head = (
            "import os, signal, subprocess, sys, time",
            f"sys.path.insert(0, {str(HERE)!r})",
            "from watched import *",
            f"model, library, plugin = {str(self.gguf)!r}, {str(self.library)!r}, {PLUGIN!r}",
            f"mark = {str(mark or path)!r}",
        )
        with open(handle, "w") as file:
            file.write("\n".join((*head, *lines)) + "\n")
        return [sys.executable, "-B", path]

    def said(self, *lines, options=(), **environment):
        """exec's warnings. The lines before them are about flags."""
        words = self.python(*lines, SEEN)
        stderr = self.exec(*words, options=options, **environment)[1]
        return [line for line in stderr.splitlines() if "exec: warning" in line]

    def said_of_all(self, cases):
        """Runs them at the same time, because each one sleeps."""
        with concurrent.futures.ThreadPoolExecutor() as pool:
            return list(pool.map(lambda lines: self.said(*lines), cases))

    def assertSays(self, said, text):
        self.assertEqual(len(said), 1, said)
        self.assertIn(text, said[0])
        self.assertIn("model.gguf was", said[0])

    def test_reasons_are_told_apart(self):
        cases = (
            (["map(model)"], self.STATIC),
            (["file = open(model)"], self.STATIC),
            (["map(model)", "map(library)"], self.LINKED),
            (["map(model)", "report('loaded')"], self.ELSEWHERE),
            (["map(model)", "map(library)", "map(plugin)", "report('loaded')"], self.ELSEWHERE),
        )
        said = self.said_of_all([lines for lines, _ in cases])
        for (lines, text), line in zip(cases, said):
            with self.subTest(lines):
                self.assertSays(line, text)

    def test_llama_cpp_programs(self):
        """A list of devices needs no cache. A warning about a device that the user chose came
        before.
        """
        server = self.folder / "llama-server"
        python = " ".join(self.python("map(model)", SEEN, mark=server))
        program(self.folder, "llama-server", f'exec {python} "$@"')
        for flags, said in (
            (["-m", self.gguf], self.STATIC),
            (["--list-devices"], None),
            (["--device", "Vulkan0"], "the device is set to 'Vulkan0'"),
        ):
            lines = self.exec(server, *flags)[1].splitlines()
            lines = [line for line in lines if line.startswith("kvant: ")]
            self.assertEqual(len(lines), 0 if said is None else 1, lines)
            self.assertIn(said or "", "".join(lines))

    def test_quiet_is_silent(self):
        self.assertEqual(self.said("map(model)", options=["--quiet"]), [])
        self.assertEqual(self.said("map(model)", KVANT_QUIET="1"), [])

    def test_names_of_models(self):
        """Ollama's models have no ending."""
        (self.folder / "blobs").mkdir()
        paths = [self.folder / name for name in ("blobs/sha256-0a1b", "sha256-0a1b", "x.bin")]
        for path in paths:
            path.write_bytes(self.gguf.read_bytes())
        first, *others = self.said_of_all([[f"map({str(path)!r})"] for path in paths])
        self.assertEqual(len(first), 1, first)
        self.assertIn("sha256-0a1b was opened", first[0])
        self.assertEqual(others, [[], []])

    def test_nothing_is_said_without_a_reason(self):
        cases = (
            [],
            ["map(library)"],
            ["report('loaded')"],  # a list of devices
            ["report('loaded')", "file = open(model)"],  # a model that was not loaded
            ["report('refused')", "map(model)", "map(library)"],  # the plug-in gave the reason
            ["report('loaded')", "report('context')", "map(model)"],
            ["map(plugin)", "map(model)", "map(library)"],  # the plug-in's report did not arrive
        )
        for lines, said in zip(cases, self.said_of_all(cases)):
            with self.subTest(lines):
                self.assertEqual(said, [])

    def test_a_program_that_another_one_starts(self):
        """A server with its own session and without the first program's descriptors, which ends
        later.
        """

        def start(body):
            child = f"[sys.executable, '-c', {body!r}, model]"
            files = "stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
            return f"child = subprocess.Popen({child}, start_new_session=True, {files})"

        body = "import sys; file = open(sys.argv[1]); sys.stdin.read()"
        said = self.said(start(body), SEEN, "child.communicate()")
        self.assertSays(said, self.STATIC)
        begun = time.monotonic()
        body = "import sys, time; file = open(sys.argv[1]); time.sleep(60)"
        done = self.exec(*self.python(start(body), "print(child.pid)", SEEN))
        os.kill(int(done[0][0]), signal.SIGKILL)
        self.assertNotIn("warning", done[1])
        self.assertLess(time.monotonic() - begun, 30)

    def test_a_server_is_told_before_its_end(self):
        begun = time.monotonic()
        words = command("exec", "--", *self.python("map(model)", "time.sleep(100)"))
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
            lines = [server.stderr.readline() for _ in range(3)]
            self.assertIsNone(server.poll())
            server.kill()
            self.assertSays(lines[2:], self.STATIC)
            self.assertEqual(server.stderr.read(), "")  # the line is not printed again
        self.assertLess(time.monotonic() - begun, 60)

    def test_the_program_is_as_without_exec(self):
        """The program's process id, input, status, descriptors and children."""
        lines = (
            "import glob",
            "print(os.getpid(), os.getppid(), os.getpgrp(), os.getsid(0), sys.stdin.read())",
            "print(sorted(os.listdir('/proc/self/fd')))",
            "print(*(open(f).read() for f in glob.glob('/proc/self/task/*/children')), '.')",
            "sys.exit(7)",
        )
        program = self.python(*lines)
        out = []
        for words in (program, command("exec", "--", *program)):
            with subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as started:
                stdout, _ = started.communicate("input", timeout=60)
            self.assertEqual(started.returncode, 7)
            first, *rest = stdout.splitlines()
            number, *numbers = first.split()
            self.assertEqual(int(number), started.pid)
            out.append((numbers, rest))
        self.assertEqual(out[0], out[1])

    def test_signals_reach_the_program_alone(self):
        """Ctrl-C is a signal to the program's group. The line is printed nevertheless."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            lines = (
                "signal.signal(signal.SIGINT, signal.SIG_DFL)",
                "map(model)",
                SEEN,
                "print('ready', flush=True)",
                "time.sleep(100)",
            )
            words = command("exec", "--", *self.python(*lines))
            with subprocess.Popen(
                words,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            ) as started:
                self.assertEqual(started.stdout.readline(), "ready\n")
                os.killpg(started.pid, number)
                stderr = started.communicate(timeout=60)[1]
            self.assertEqual(started.returncode, -number)
            self.assertIn(self.STATIC, stderr)

    def test_a_program_with_ggml_in_its_file(self):
        """exec finds it out before the program starts. ggml's text may lie anywhere in the first 64
        MiB.
        """
        text = b"not enough space in the context's memory pool"
        kobold = self.folder / "koboldcpp"
        data = pathlib.Path(shutil.which("true")).read_bytes()
        mib = 1 << 20
        for place, found in (
            (0, True),
            (2 * mib - 1 - len(data), True),
            (2 * mib - len(text) - len(data), True),
            (2 * mib + 1 - len(text) - len(data), True),
            (63 * mib, True),
            (65 * mib, False),
        ):
            with open(kobold, "wb") as file:
                file.write(data)
                file.seek(len(data) + place)
                file.write(text + b" (needed %zu)")
            kobold.chmod(0o755)
            for words in ([kobold], ["nice", kobold]):
                said = self.exec(*words)[1]
                self.assertEqual("'koboldcpp' has ggml linked in" in said, found, place)
                self.assertEqual(said.count("\n"), 1 if found else 2)
                self.assertEqual(self.exec(*words, options=["--quiet"])[1], "")
        shutil.copy(shutil.which("sleep"), kobold)
        with open(kobold, "ab") as file, open(self.gguf) as model:
            file.write(text)
            file.close()
            words = command("exec", "--", kobold, "1")
            done = subprocess.run(words, stdin=model, stderr=subprocess.PIPE, text=True)
        self.assertEqual(done.stderr.count("\n"), 1)  # the line is not printed again at the end
        script = program(self.folder, "koboldcpp.sh", f"exit 0 # {text.decode()}")
        self.assertNotIn("linked in", self.exec(script)[1])


if __name__ == "__main__":
    unittest.main()
