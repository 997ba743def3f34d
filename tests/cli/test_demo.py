"""scripts/demo.py with a mock of the command: its output on a terminal and elsewhere, and Ctrl-C.
No model is needed.
"""

import json
import os
import pathlib
import pty
import signal
import subprocess
import sys
import tempfile
import time
import unittest

DEMO = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "demo.py"

# A model with 12288 bytes of f16 per token, after 1024 tokens; in the presets 64 of them stay fp16.
F16 = 12288 * 1024
CACHES = {
    "f16": (16, F16, 0, 1),
    "q8_0": (8.5, F16 * 8.5 / 16, 0.0048, 0.978),
    "q4_0": (4.5, F16 * 4.5 / 16, 0.648, 0.644),
    "quality": (5.25, F16 * 5.25 / 16 + 64 * 12288, 0.0044, 0.971),
    "balanced": (4.25, F16 * 4.25 / 16 + 64 * 12288, 0.0202, 0.937),
    "small": (3.25, F16 * 3.25 / 16 + 64 * 12288, 0.08, 0.857),
}

MOCK = """#!{python}
import json, os, sys, time
caches, words = {caches!r}, sys.argv[1:]
names = [b for a, b in zip(words, words[1:]) if a in ("--stock", "--preset")]
if words[0] == "eval":
    print('{{"done": 1}}', file=sys.stderr)
    if os.environ.get("HANG"):
        with open(os.environ["HANG"] + ".part", "w") as file:
            file.write(str(os.getpid()))
        os.rename(os.environ["HANG"] + ".part", os.environ["HANG"])
        time.sleep(60)
        print("llama_decode: failed", file=sys.stderr)
    if os.environ.get("FAIL"):
        sys.exit("kvant: eval: a reason")
    names = ["f16", *names]
    figures = ("bits", "kv_bytes", "kld_mean", "top1")
    print(json.dumps([dict(zip(figures, caches[n])) for n in names]))
elif words[0] == "bench":
    spread = float(os.environ.get("SPREAD", "0.02"))
    speed = dict(decode_tps=100.0, decode_low=100 - 100 * spread, decode_high=100.0)
    print(json.dumps([speed for n in names]))
elif words[0] == "run":
    prompt = sys.stdin.read()
    right = "Golden Heron" in prompt and names != ["q4_0"]
    print("The Golden Heron." if right else "!!\\x1b[5m" * 60)
"""


class Demo(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.command = pathlib.Path(folder.name) / "kvant"
        self.command.write_text(MOCK.format(python=sys.executable, caches=CACHES))
        self.command.chmod(0o755)
        text = pathlib.Path(folder.name) / "text.txt"
        text.write_text("A paragraph of the text.\n\n" * 400)
        self.arguments = [
            sys.executable,
            "-B",
            DEMO,
            "--kvant",
            self.command,
            "--model",
            "qwen.gguf",
            "--text",
            text,
        ]

    def environment(self, **more):
        return {
            **{
                name: value
                for name, value in os.environ.items()
                if name not in ("NO_COLOR", "TERM")
            },
            "KVANT_RUNTIME": "/nowhere",
            "TERM": "xterm",
            **more,
        }

    def run_demo(self, *more, **environment):
        return subprocess.run(
            [*self.arguments, *more],
            capture_output=True,
            text=True,
            env=self.environment(**environment),
            timeout=60,
        )

    def on_a_terminal(self, **environment):
        terminal, slave = pty.openpty()
        with subprocess.Popen(
            self.arguments,
            stdout=slave,
            stderr=subprocess.DEVNULL,
            env=self.environment(**environment),
        ) as child:
            os.close(slave)
            out = b""
            while chunk := self.read(terminal):
                out += chunk
        os.close(terminal)
        self.assertEqual(child.returncode, 0)
        return out.decode()

    def read(self, terminal):
        try:
            return os.read(terminal, 4096)
        except OSError:  # Linux reports in this way that the terminal is closed
            return b""

    def test_what_it_shows(self):
        done = self.run_demo()
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stdout.splitlines()
        self.assertLessEqual(
            max(map(len, lines[:-1])), 78
        )  # the last line names the command, whose folder may be anywhere
        self.assertEqual([line.split()[0] for line in lines[2:8]], list(CACHES))
        # The memory is 32768 tokens at 4.25 bits in place of 16, and 64 tokens as fp16.
        self.assertRegex(
            done.stdout, r"balanced \(default\) +102\.8 +0\.27 +0\.0202 +93\.7 % +100\.0  98 to 100"
        )
        self.assertIn(
            "balanced: 0.27 of f16's memory, 1/32 of q4_0's divergence, 0.95 of its size.",
            done.stdout,
        )
        self.assertIn("Below 0.01 a difference is hard to see", done.stdout.replace("\n", " "))
        for name, answer in (
            ("f16", "The Golden Heron."),
            ("balanced", "The Golden Heron."),
            ("q4_0", "!!"),
        ):
            self.assertRegex(done.stdout, rf"(?m)^{name} +{answer}")
        self.assertEqual(lines[-1].split()[1:], ["exec", "--", "llama-server", "-m", "model.gguf"])
        self.assertNotIn("\033", done.stdout)
        self.assertNotIn("{", done.stderr)

    def test_no_speed_where_rounds_disagree(self):
        out = self.run_demo(SPREAD="0.3").stdout
        self.assertNotIn("100.0  ", out)
        self.assertNotIn("tokens/s", out)
        self.assertIn("this machine is busy", out.replace("\n", " "))

    def test_colour_on_a_terminal_only(self):
        self.assertIn("\033[31m 0.6480", self.on_a_terminal())
        self.assertNotIn("\033", self.on_a_terminal(NO_COLOR="1"))
        self.assertNotIn("\033", self.on_a_terminal(TERM="dumb"))

    def test_numbers_as_json(self):
        rows = json.loads(self.run_demo("--json").stdout)
        self.assertEqual([row["name"] for row in rows], list(CACHES))
        self.assertEqual(rows[0]["fits"], 12288 * 32768)

    def test_a_command_that_fails_is_heard(self):
        done = self.run_demo(FAIL="1")
        self.assertEqual(done.returncode, 1)
        self.assertIn("kvant: eval: a reason", done.stderr)
        self.arguments[4] = "/nonexistent/kvant"
        done = self.run_demo()
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("`make` builds the command", done.stderr)

    def test_interrupted(self):
        begun = self.command.with_name("begun")
        with subprocess.Popen(
            self.arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment(HANG=str(begun)),
        ) as child:
            while not begun.exists() and child.poll() is None:
                time.sleep(0.02)
            child.send_signal(signal.SIGINT)
            out, err = child.communicate(timeout=20)
        self.assertEqual((child.returncode, out), (130, ""), err)
        self.assertRegex(err, "^quality of qwen.*\ndemo: stopped; what was fetched stays\n$")
        self.assertFalse(
            pathlib.Path(f"/proc/{begun.read_text()}").exists(), "the command still runs"
        )


if __name__ == "__main__":
    unittest.main()
