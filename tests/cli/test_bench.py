"""kvant bench attention and kvant bench cuda; the second runs on a mock GPU in the host's
memory.
"""

import json
import os
import pathlib
import shutil
import tempfile
import unittest

from testing import KVANT, LIB, PAPERS, SRC, run, temporary_folder

OK, RUNTIME, USAGE = 0, 1, 2
CUDA_LIBRARY = pathlib.Path(KVANT).resolve().parent.parent / "lib" / "libkvant_cuda.so"


class BenchAttention(unittest.TestCase):
    SMALL = "bench attention -n 128 -d 64 -g 3 -r 2 --kv-heads 1 --json".split()

    def test_every_shape_codec_and_level(self):
        done = run(
            *self.SMALL,
            *"--stock none -k int-4 -k trellis-4 -v bdr-4 -q 1,16 -d 40,64".split(),
            "--levels",
            "c,auto",
            code=OK,
        )
        self.assertIn("GB/s", done.stderr)
        rows = json.loads(done.stdout)
        self.assertEqual(len(rows), 2 * 2 * 2 * 2)
        self.assertEqual(
            {(row["k"], row["v"]) for row in rows}, {("int-4", "int-4"), ("trellis-4", "bdr-4")}
        )
        for row in rows:
            speed = row["bytes"] / row["microseconds"] / 1e3
            self.assertAlmostEqual(row["gbytes_per_second"] / speed, 1, places=6)
            self.assertAlmostEqual(
                row["share_of_bandwidth"] * row["read_gbytes_per_second"] / speed, 1, places=6
            )
            self.assertIsNone(row["times_f16"])

    def test_bad_values(self):
        for bad, said in (
            (["-n", "63"], "--tokens"),
            (["-q", "0"], "--queries"),
            (["-d", "64,"], "--head-dim"),
            (["-q", "256"], "more than --tokens 128"),
            (["--levels", "mmx"], "--levels"),
            (["-r", "0"], "--rounds"),
            (["--stock", "none", "--stock", "q8_0"], "--stock none"),
        ):
            done = run(*self.SMALL, *bad)
            self.assertEqual((done.returncode, done.stdout), (USAGE, ""), bad)
            self.assertIn(said, done.stderr)
        done = run("bench", "attention", "-v", "int-4", code=USAGE)
        self.assertIn("no -k before it", done.stderr)

    def test_codecs_are_checked_first(self):
        for bench, spec, said in (
            ("attention", "trelis-4", "did you mean 'trellis-4'?"),
            ("cuda", "q4_0", "q4_0 is a type of llama.cpp's own cache"),
            ("encode", "int-9", "int takes 2 to 8 bits"),
        ):
            done = run("bench", bench, "-k", spec)
            self.assertEqual((done.returncode, done.stdout), (USAGE, ""), done.stderr)
            self.assertTrue(
                done.stderr.startswith(f"kvant: bench {bench}: -k {spec}: "), done.stderr
            )
            self.assertIn(said, done.stderr)

    @unittest.skipUnless(LIB and SRC, "no llama.cpp runtime")
    def test_ggml_runs_beside_it(self):
        done = run(
            *self.SMALL, "-k", "int-4", "--stock", "q8_0", "-q", "1,128", KVANT_RUNTIME=LIB, code=OK
        )
        rows = json.loads(done.stdout)
        self.assertEqual([row["k"] for row in rows], ["f16", "q8_0", "int-4"] * 2)
        for f16, *others in (rows[:3], rows[3:]):
            self.assertEqual((f16["library"], f16["times_f16"]), ("ggml", 1))
            for row in others:
                self.assertAlmostEqual(
                    row["times_f16"] * row["microseconds"] / f16["microseconds"], 1, places=6
                )
        self.assertEqual(run(*self.SMALL, "--stock", "q3_0").returncode, USAGE)


class BenchCuda(unittest.TestCase):
    def check(self, arguments, code, *words):
        result = run("bench", "cuda", *arguments)
        self.assertEqual((result.returncode, result.stdout), (code, ""), result.stderr)
        for word in words:
            self.assertIn(word, result.stderr)

    def test_bad_values(self):
        self.check(["--heads", "7"], 2, "multiple of --kv-heads 8")
        self.check(["-v", "int-4"], 2, "no -k before it")
        self.check(["--tokens", "0"], 2, "--tokens", "1 to 4194304")
        self.check(["--rounds", "many"], 2, "--rounds")

    def test_library_that_is_not_there(self):
        self.check(
            ["--library", "/nowhere/libkvant_cuda.so"], 1, "cannot load", "make cuda", "--library"
        )

    def test_library_that_is_another_one(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "libkvant_cuda.so"
            path.write_text("not a library")
            self.check(["--library", path], 1, "cannot load", str(path))
        self.check(
            ["--library", "libm.so.6"], 1, "libm.so.6 has no kvant_cuda_table_get", "this release"
        )

    @unittest.skipUnless(CUDA_LIBRARY.exists(), "libkvant_cuda was not built")
    @unittest.skipIf(shutil.which("nvidia-smi"), "a machine with a GPU")
    def test_no_driver(self):
        self.check(["--library", CUDA_LIBRARY], 1, "no NVIDIA driver", "kvant bench attention")


@unittest.skipUnless(os.environ.get("CUDA_HOST"), "no mock of a GPU")
class BenchCudaHost(unittest.TestCase):
    """The arguments that the benchmark passes to a GPU: tests/cuda/host computes attention from
    them on the CPU.
    """

    def setUp(self):
        self.folder = temporary_folder(self.addCleanup)
        os.symlink(os.environ["CUDA_HOST"], self.folder / "libcuda.so.1")

    def bench(self, *arguments, **environment):
        library = os.environ["CUDA_HOST"]
        return run(
            "bench",
            "cuda",
            "--library",
            library,
            *arguments,
            LD_LIBRARY_PATH=self.folder,
            **environment,
        )

    def test_pages_table_and_queries_are_right(self):
        in_groups = "kivi-2" if PAPERS else "int-2:axis=channel"
        done = self.bench(
            *"-k int-4 -k turboquant-4 -v int-2 -k".split(),
            in_groups,
            *"-b 2 --heads 4 --kv-heads 2 -d 64 -n 3000,65 -r 2 --json".split(),
        )
        self.assertEqual(done.returncode, OK, done.stderr)
        self.assertIn("host GPU 0, a copy reads and writes", done.stderr)
        rows = json.loads(done.stdout)
        self.assertEqual(
            [(row["k"], row["v"], row["tokens"]) for row in rows],
            [
                (k, v, n)
                for n in (3000, 65)
                for k, v in (("int-4",) * 2, ("turboquant-4", "int-2"), (in_groups,) * 2)
            ],
        )
        for row in rows:
            self.assertLess(row["error"], 0.004)  # bf16 rounds to 2^-9
            self.assertEqual(
                (row["device"], row["driver_cuda"], row["batch"], row["rounds"]),
                ("host GPU 0", 13, 2, 2),
            )
            speed = row["bytes"] / row["microseconds"] / 1e3
            self.assertAlmostEqual(row["gbytes_per_second"] / speed, 1, places=6)
            self.assertAlmostEqual(
                row["share_of_copy"] * row["copy_gbytes_per_second"] / speed, 1, places=6
            )
        int4 = (
            2 * 2 * 64 * (64 * 4 / 8 + 4)
        )  # batch, kv heads, tokens of a page, codes and scale: for keys or values
        self.assertEqual(rows[0]["bytes"], 2 * 47 * int4)
        self.assertEqual(rows[3]["bytes"], 2 * 2 * int4)

    def test_what_does_not_work_is_said(self):
        for arguments, said in (
            (["-k", "int-4", "-n", "4194304"], "give fewer --tokens"),
            (["--device", "1"], "no device 1: this machine has 1"),
            (["-k", "int-4", "-d", "72", "-n", "64"], "not on the GPU: head_dim 72"),
        ):
            done = self.bench("-r", "1", *arguments)
            self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""), arguments)
            self.assertIn(said, done.stderr)
        done = self.bench(
            "-r", "1", "-k", "int-4", "-n", "64", HOST_CUDA_NO_PAIR="no kernel for this pair"
        )
        self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""))
        self.assertIn("no kernel for this pair", done.stderr)

    def test_table(self):
        done = self.bench("-k", "int-4", "-n", "64", "-r", "1")
        self.assertEqual(done.returncode, OK, done.stderr)
        heading, line = done.stdout.splitlines()
        self.assertEqual(heading.split()[:4], ["K", "V", "batch", "heads"])
        self.assertEqual(line.split()[:4], ["int-4", "int-4", "1", "32"])


if __name__ == "__main__":
    unittest.main()
