"""kvant selftest on the CPUs of this machine and on a mock GPU in the host's memory
(tests/cuda/host): it passes right kernels and finds kernels that are slightly wrong.
"""

import getpass
import json
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import unittest

from testing import KVANT, PAPERS, run, temporary_folder

OK, WRONG, USAGE, INTERRUPTED = 0, 1, 2, 130
HOST = os.environ.get("CUDA_HOST", "")
WRONG_KVANT = os.environ.get("KVANT_WRONG_COMMAND", "")
IN_GROUPS = "kivi-2" if PAPERS else "int-2:axis=channel"


def best_level():
    return run("--version").stdout.split("CPU level ")[1].split(";")[0]


class Cpus(unittest.TestCase):
    def test_right_and_complete(self):
        done = run("selftest", "-c", "int-4", "--json")
        self.assertEqual(done.returncode, OK, done.stdout + done.stderr)
        told = json.loads(done.stdout)
        self.assertEqual((told["kvant_selftest"], told["verdict"]), (1, "right"))
        levels = [device["level"] for device in told["devices"] if device["kind"] == "cpu"]
        self.assertEqual(levels[0], "c")
        self.assertIn(best_level(), levels)
        self.assertEqual(
            [(r["device"], r["head_dim"]) for r in told["results"]],
            [(i, d) for d in (64, 128) for i in range(len(told["devices"]))],
        )
        for result in told["results"]:
            self.assertEqual(
                {result[what] for what in ("encode", "decode", "attention")}, {"right"}, result
            )
            self.assertLess(result["attention_error_share_of_bound"], 1)
        speed = told["speeds"][0]
        self.assertEqual(levels[speed["device"]], best_level())
        self.assertAlmostEqual(
            speed["attention_bytes_read"] / speed["attention_seconds"] / 1e9,
            speed["attention_gbytes_read_per_second"],
        )

    def test_table_and_file(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "report.json"
            done = run("selftest", "-c", IN_GROUPS, "--report", path)
            self.assertEqual(done.returncode, OK, done.stdout + done.stderr)
            text = path.read_text()
        self.assertIn(f"CPU {best_level()}", done.stdout)
        self.assertRegex(
            done.stdout.splitlines()[-1],
            r"^verdict: right: \d+ CPU levels, 0 GPUs, \d+ results, 0 wrong",
        )
        self.assertEqual(json.loads(text)["verdict"], "right")
        for private in (getpass.getuser(), socket.gethostname(), folder, str(pathlib.Path.home())):
            self.assertNotIn(f'"{private}', text)
        self.assertNotIn("/", text)

    def test_mistakes(self):
        done = run("selftest", "-c", "int-9", code=USAGE)
        self.assertIn("--codec int-9", done.stderr)
        self.assertEqual(run("selftest", "word").returncode, USAGE)
        done = run(
            "selftest", "-c", "int-4", "--no-speeds", "--report", "/nowhere/report.json", code=WRONG
        )
        self.assertEqual(done.stdout, "")
        self.assertIn("selftest: --report: cannot write to the folder /nowhere", done.stderr)

    def test_interrupted(self):
        started = subprocess.Popen(
            [KVANT, "selftest"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        while "left" not in started.stderr.readline():
            self.assertIsNone(started.poll())
        started.send_signal(signal.SIGINT)
        out, _ = started.communicate(timeout=100)
        self.assertEqual(started.returncode, INTERRUPTED, out)
        self.assertIn("verdict: interrupted", out)


@unittest.skipUnless(WRONG_KVANT, "no command with wrong kernels")
class WrongCpus(unittest.TestCase):
    """Runs the command whose kernels are wrong at one level (wrong.c)."""

    def check(self, wrong, *words):
        env = {**os.environ, "KVANT_WRONG": wrong}
        done = subprocess.run(
            [WRONG_KVANT, "selftest", "-c", "turboquant-4", "--no-speeds"],
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        self.assertEqual(done.returncode, WRONG, done.stdout)
        self.assertIn("verdict: wrong", done.stdout)
        level = wrong.split(":")[0]
        lines = [line for line in done.stdout.splitlines() if line.startswith("wrong: ")]
        self.assertEqual(len(lines), 2, done.stdout)  # head_dim 64 and 128 of this level only
        for line, dim in zip(lines, (64, 128)):
            for word in (f"CPU {level}", "turboquant-4", f"head_dim {dim}", *words):
                self.assertIn(word, line)

    def test_nothing_wrong(self):
        done = subprocess.run(
            [WRONG_KVANT, "selftest", "-c", "turboquant-4", "--no-speeds"],
            capture_output=True,
            text=True,
            timeout=300,
        )
        self.assertEqual(done.returncode, OK, done.stdout)

    def test_encode(self):
        self.check(f"{best_level()}:encode", "encode of keys: 1 of", "page 2, kv head 1")

    def test_decode(self):
        self.check(
            f"{best_level()}:decode", "decode of keys, token 63, kv head 0: off by 0.01", "bound"
        )

    def test_attention(self):
        self.check(
            f"{best_level()}:attention",
            "attention of 32 query tokens, token 31, head 2: off by",
            "bound",
        )


@unittest.skipUnless(HOST, "no mock of a GPU")
class Gpus(unittest.TestCase):
    def setUp(self):
        self.folder = temporary_folder(self.addCleanup)
        os.symlink(HOST, self.folder / "libcuda.so.1")

    def selftest(self, codec, *words, **environment):
        environment = {
            "KVANT_CUDA_LIBRARY": HOST,
            "LD_LIBRARY_PATH": self.folder,
            "KVANT_TEST_FREE_BYTES": str(64 << 20),
            **environment,
        }
        speeds = [] if "speeds" in words else ["--no-speeds"]
        words = [word for word in words if word != "speeds"]
        done = run("selftest", "-c", codec, "--json", *speeds, *words, **environment)
        told = json.loads(done.stdout)
        gpu = next(i for i, device in enumerate(told["devices"]) if device["kind"] == "gpu")
        return done.returncode, told, gpu, [r for r in told["results"] if r["device"] == gpu]

    def test_right(self):
        for codec in ("trellis-4", IN_GROUPS, "int-4:transform=file"):
            code, told, gpu, results = self.selftest(codec)
            self.assertEqual((code, told["verdict"]), (OK, "right"), results)
            self.assertEqual(
                [(r["encode"], r["decode"], r["attention"]) for r in results], [("right",) * 3] * 2
            )
        self.assertEqual(told["devices"][gpu]["name"], "host GPU 0")
        self.assertEqual(told["devices"][gpu]["compute_capability"], "8.6")
        self.assertEqual(told["devices"][gpu]["shared_bytes_per_block"], 99 << 10)

    def test_two_gpus(self):
        code, told, _, _ = self.selftest("int-4", HOST_CUDA_DEVICES="2")
        gpus = [i for i, device in enumerate(told["devices"]) if device["kind"] == "gpu"]
        self.assertEqual((code, told["verdict"], len(gpus)), (OK, "right", 2))
        self.assertEqual([r["device"] for r in told["results"] if r["device"] in gpus], gpus * 2)

    def test_speeds(self):
        _, told, gpu, _ = self.selftest("int-8", "speeds")
        speed = next(s for s in told["speeds"] if s["device"] == gpu)
        self.assertEqual(
            (speed["sequences"], speed["tokens_per_sequence"], speed["kv_heads"]), (1, 8192, 8)
        )
        self.assertEqual(speed["attention_bytes_read"], 8192 * 8 * 2 * (128 + 4))
        self.assertGreater(speed["encoded_rows_per_second"], 0)

    def test_wrong_kernels_are_found(self):
        for wrong, codec, what, said in (
            ("append", "int-4", "encode", "encode of values: 1 of"),
            ("seal", IN_GROUPS, "encode", "encode of keys: 1 of"),
            ("decode", "int-4", "decode", "decode of keys, token 0, kv head 0: off by"),
            (
                "attention",
                "trellis-4",
                "attention",
                "attention of 32 query tokens, token 31, head 7: off by",
            ),
        ):
            code, told, _, results = self.selftest(codec, HOST_CUDA_WRONG=wrong)
            self.assertEqual((code, told["verdict"]), (WRONG, "wrong"), wrong)
            for result in results:
                self.assertEqual(
                    {name for name in ("encode", "decode", "attention") if result[name] == "wrong"},
                    {what},
                )
                self.assertIn(said, result["why"])

    def test_no_kernel_is_no_pass(self):
        code, told, _, results = self.selftest("turboquant-4:rotate=dense")
        self.assertEqual((code, told["verdict"]), (OK, "right"))
        self.assertEqual({r["attention"] for r in results}, {"no kernel on GPUs"})
        self.assertIn("rotate=dense", results[0]["why"])

    def test_limit_of_shared_memory(self):
        _, told, _, _ = self.selftest("int-4", "--shared-memory", "99")
        self.assertEqual(told["shared_memory_limit_kib"], 99)
        self.assertEqual(self.selftest("int-4")[1]["shared_memory_limit_kib"], 0)

    def test_a_gpu_without_the_library_is_not_right(self):
        code, told, gpu, results = self.selftest(
            "int-4", KVANT_CUDA_LIBRARY="/nowhere/libkvant_cuda.so"
        )
        self.assertEqual((code, told["verdict"], results), (WRONG, "not complete", []))
        self.assertIsNotNone(told["devices"][gpu]["why"])
        self.assertNotIn("nowhere", json.dumps(told))


if __name__ == "__main__":
    unittest.main()
