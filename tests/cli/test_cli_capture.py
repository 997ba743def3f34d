"""kvant capture with a model: the file by its format alone, its numbers against a calibration of
the same tokens, and no half-written file after any end.
"""

import fcntl
import json
import pathlib
import resource
import signal
import struct
import subprocess
import tempfile
import time
import unittest

from test_cli_calibrate import HEAD_DIM, N_HEADS, N_KV_HEADS, parse
from testing import LIB, N_LAYERS, ON_SMALL, SMALL, TEXT, command, run, temporary_folder

OK, RUNTIME, USAGE, INTERRUPTED = 0, 1, 2, 130
TOKENS, CTX, STEP = 112, 64, 8  # one context and three quarters
LAST = N_LAYERS - 1


def read(data):
    """Header and {name: (shape, numbers)} of a safetensors file."""
    (n,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + n])
    tensors, covered = {}, 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        kind, size = {"F16": ("e", 2), "F64": ("d", 8), "I32": ("i", 4)}[entry["dtype"]]
        assert begin == covered and (end - begin) % size == 0
        covered = end
        tensors[name] = (
            entry["shape"],
            struct.unpack_from(f"<{(end - begin) // size}{kind}", data, 8 + n + begin),
        )
    assert 8 + n + covered == len(data)
    return header["__metadata__"], tensors


class Capture(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = temporary_folder(cls.addClassCleanup)
        cls.path = cls.folder / "model.safetensors"
        cls.base = ["capture", *ON_SMALL, "-n", TOKENS, "-c", CTX]
        words = ["-o", cls.path, "--queries", STEP, "--layers", f"0,2-{LAST}", "--json"]
        done = run(*cls.base, *words, code=OK)
        cls.row = json.loads(done.stdout)[0]
        cls.data = cls.path.read_bytes()
        cls.metadata, cls.tensors = read(cls.data)

    def test_what_the_file_says(self):
        queries = CTX // STEP + (TOKENS - CTX) // STEP
        self.assertEqual(self.row["layers"], LAST)
        self.assertEqual(
            (self.row["tokens"], self.row["ctx"], self.row["queries"]), (TOKENS, CTX, queries)
        )
        self.assertEqual(self.row["bytes"], len(self.data))
        self.assertEqual(
            set(self.tensors),
            {"windows"} | {f"layers.{i}.{c}" for i in (0, *range(2, LAST + 1)) for c in "kvq"},
        )
        self.assertEqual(self.tensors["layers.2.k"][0], [N_KV_HEADS, TOKENS, HEAD_DIM])
        self.assertEqual(self.tensors["layers.2.v"][0], [N_KV_HEADS, TOKENS, HEAD_DIM])
        self.assertEqual(self.tensors[f"layers.{LAST}.q"][0], [N_HEADS, queries, HEAD_DIM])
        self.assertEqual(self.tensors["windows"], ([N_LAYERS], (0,) * N_LAYERS))
        self.assertEqual(self.metadata["format"], "kvant-capture-1")
        self.assertEqual(self.metadata["tokens"], str(TOKENS))
        self.assertEqual(self.metadata["layers.2.attention"], "0.125 0 0")
        self.assertRegex(self.metadata["model_fingerprint"], "^[0-9a-f]{16}$")

    def test_numbers_are_those_that_a_calibration_sees(self):
        """Means of keys and values and the second moment of queries, for the same tokens, which
        another part of the program gathers.
        """
        calibration, every = (
            self.path.with_name(name) for name in ("c.kvcal", "every.safetensors")
        )
        arguments = [*ON_SMALL, "-n", TOKENS, "-c", CTX]
        run("calibrate", *arguments, "-o", calibration, "--clusters", "none", code=OK)
        run("capture", *arguments, "-o", every, "--layers", "2", code=OK)
        _, tensors = read(every.read_bytes())
        self.assertEqual(tensors["layers.2.k"], self.tensors["layers.2.k"])
        sites = parse(calibration.read_bytes())
        for role, letter in enumerate("kv"):
            numbers = tensors[f"layers.2.{letter}"][1]
            for i, mean in enumerate(sites[2, role]["mean"]):
                head, channel = divmod(i, HEAD_DIM)
                column = numbers[
                    head * TOKENS * HEAD_DIM + channel : (head + 1) * TOKENS * HEAD_DIM : HEAD_DIM
                ]
                largest = max(map(abs, column))
                # Each number was rounded to fp16, by at most 2^-11 of itself.
                self.assertAlmostEqual(sum(column) / TOKENS, mean, delta=2**-11 * largest + 1e-6)
        queries, group = tensors["layers.2.q"][1], N_HEADS // N_KV_HEADS
        for head in range(N_KV_HEADS):
            first = head * group * TOKENS * HEAD_DIM
            for a, b in ((0, 0), (0, 1), (17, 40)):
                pairs = range(first, first + group * TOKENS * HEAD_DIM, HEAD_DIM)
                mean = sum(queries[i + a] * queries[i + b] for i in pairs) / len(pairs)
                largest = max(abs(queries[i + a] * queries[i + b]) for i in pairs)
                moment = sites[2, 0]["moment"][head * HEAD_DIM**2 + a * HEAD_DIM + b]
                self.assertAlmostEqual(mean, moment, delta=2**-9 * largest)

    def test_queries_are_of_the_tokens_they_should_be(self):
        every = self.path.with_name("q.safetensors")
        run(*self.base, "-o", every, "--layers", LAST, code=OK)
        _, tensors = read(every.read_bytes())
        n_queries = self.tensors[f"layers.{LAST}.q"][0][1]
        all_queries = tensors[f"layers.{LAST}.q"][1]
        positions = [*range(STEP - 1, CTX, STEP), *range(CTX + STEP - 1, TOKENS, STEP)]
        self.assertEqual(len(positions), n_queries)
        for head in range(N_HEADS):
            for i, position in enumerate(positions):
                at, of = (head * n_queries + i) * HEAD_DIM, (head * TOKENS + position) * HEAD_DIM
                self.assertEqual(
                    self.tensors[f"layers.{LAST}.q"][1][at : at + HEAD_DIM],
                    all_queries[of : of + HEAD_DIM],
                )

    def test_contexts_from_all_parts_of_a_text(self):
        """The second part is the second half of the text, and reads like a separate text."""
        halves = [" sun" * 64, " rain" * 64]
        captured = []
        for name, text, more in [
            ("whole", "".join(halves), ["--spread", 2]),
            ("sun", halves[0], []),
            ("rain", halves[1], []),
        ]:
            file = self.path.with_name(name)
            file.with_suffix(".txt").write_text(text)
            run(
                "capture",
                "-m",
                SMALL,
                "-f",
                file.with_suffix(".txt"),
                "-o",
                file,
                "-c",
                32,
                "-n",
                64 if more else 32,
                *more,
                code=OK,
            )
            captured.append(read(file.read_bytes())[1]["layers.1.k"])
        (shape, whole), *parts = captured
        self.assertEqual(shape, [N_KV_HEADS, 64, HEAD_DIM])
        for part, (_, rows) in enumerate(parts):
            for head in range(N_KV_HEADS):
                first, length = (2 * head + part) * 32 * HEAD_DIM, 32 * HEAD_DIM
                self.assertEqual(
                    whole[first : first + length], rows[head * length : (head + 1) * length]
                )

    def limited(self, limit, path):
        """A disk that is full after a number of bytes."""
        return subprocess.run(
            command(*self.base, "-o", path, "--runtime", LIB),
            capture_output=True,
            text=True,
            restore_signals=False,  # SIGXFSZ stays ignored, so that writing fails with EFBIG
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
            timeout=300,
        )

    def test_a_full_disk_leaves_the_old_file(self):
        done = self.limited(100_000, self.path)
        self.assertEqual(done.returncode, RUNTIME)
        self.assertIn(str(self.path), done.stderr)
        self.assertEqual(self.path.read_bytes(), self.data)
        self.assertEqual([p.name for p in self.path.parent.glob(f"{self.path.name}.*")], [])

    def test_a_file_larger_than_the_disk_is_refused_at_once(self):
        """/dev/shm is a disk of known size on most machines; reading the text would take hours."""
        shm = pathlib.Path("/dev/shm")
        free = 0
        if shm.is_dir():
            done = subprocess.run(
                ["stat", "-f", "-c", "%a %S", shm], capture_output=True, text=True
            )
            free = (
                int(done.stdout.split()[0]) * int(done.stdout.split()[1])
                if done.returncode == 0
                else 0
            )
        tokens = free // (N_LAYERS * (2 * N_KV_HEADS + N_HEADS) * HEAD_DIM * 2) + 4096
        if free == 0 or tokens > 4_000_000:
            self.skipTest("/dev/shm is no disk of a known, moderate size")
        with tempfile.TemporaryDirectory(dir=shm) as name:
            text = pathlib.Path(name) / "text"
            text.write_text("a " * tokens)
            path = pathlib.Path(name) / "out"
            done = run(
                "capture", "-m", SMALL, "-f", text, "-o", path, "-n", tokens, "-c", 64, code=RUNTIME
            )
            self.assertIn("MiB left", done.stderr)
            self.assertEqual(list(pathlib.Path(name).iterdir()), [text])

    def test_an_interrupted_run_leaves_nothing(self):
        with tempfile.TemporaryDirectory() as name:
            path = pathlib.Path(name) / "out.safetensors"
            arguments = ["capture", *ON_SMALL, "-n", 5000, "-c", 512, "-o", path, "--runtime", LIB]
            process = subprocess.Popen(command(*arguments), stderr=subprocess.PIPE)
            for _ in range(600):
                if list(path.parent.iterdir()):
                    break
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=120)
            self.assertEqual(process.returncode, INTERRUPTED)
            self.assertEqual(list(path.parent.iterdir()), [])

    def test_another_writer_is_named(self):
        with tempfile.TemporaryDirectory() as name:
            path = pathlib.Path(name) / "out.safetensors"
            with open(f"{path}.kvant-part", "wb") as other:
                fcntl.flock(other, fcntl.LOCK_EX)
                done = run(*self.base, "-o", path, code=RUNTIME)
            self.assertIn("another process or thread is writing it", done.stderr)
            self.assertFalse(path.exists())

    def test_mistakes_are_named(self):
        broken = self.path.with_name("broken.gguf")
        with open(SMALL, "rb") as model:
            broken.write_bytes(model.read(1 << 20))
        base = ["capture", *ON_SMALL, "-o", self.path]
        for arguments, code, words in [
            (["capture", "-f", TEXT, "-o", self.path], USAGE, "no model"),
            (["capture", "-m", SMALL, "-o", self.path], USAGE, "no text"),
            (["capture", *ON_SMALL], USAGE, "no output"),
            ([*base[:-1], self.path.parent], RUNTIME, "is a folder"),
            ([*base, "--layers", "3-1"], USAGE, "--layers"),
            ([*base, "--layers", "x"], USAGE, "--layers"),
            ([*base, "--queries", "0"], USAGE, "--queries"),
            ([*base, "--spread", "0"], USAGE, "--spread"),
            ([*base, "--spread", "200", "-c", "8192", "-n", "2000000"], RUNTIME, "are needed"),
            ([*base, "--layers", N_LAYERS, "-c", "64"], RUNTIME, f"0 to {LAST}"),
            ([*base, "-c", "100000"], RUNTIME, "longer than the model's limit of"),
            ([*base[:4], "/dev/null", *base[5:]], RUNTIME, "no tokens"),
            (
                ["capture", "-m", broken, "-f", TEXT, "-o", self.path],
                RUNTIME,
                "cannot load the model",
            ),
            (
                ["capture", *ON_SMALL, "-o", "/nonexistent/file"],
                RUNTIME,
                "/nonexistent",
            ),
        ]:
            with self.subTest(arguments=arguments):
                done = run(*arguments, code=code)
                self.assertIn(words, done.stderr)
        self.assertEqual(self.path.read_bytes(), self.data)


if __name__ == "__main__":
    unittest.main()
