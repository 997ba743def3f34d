"""What a run leaves for the next one: calibrations in the user's cache folder, by a llama.cpp program (learn_probe.c) with models of
random weights. Every case has a home of its own."""

import array
import functools
import os
import pathlib
import resource
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import unittest

PROBE = os.environ["LEARN_PROBE"]
TINY = pathlib.Path(os.environ["KVANT_TINY_MODELS"])
LLAMA = TINY / "llama.gguf"
LONG, SHORT, END = 2100, 600, 1100  # tokens: enough, too few, enough at the end of a run. Every second one counts
LEARNS, HINT = "not calibrated, learns from prompts for the next run", "not calibrated: kvant calibrate"
FNV = 0xCBF29CE484222325


def fnv(data):
    value = FNV
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def fingerprint(path):
    return fingerprint_of(path.read_bytes())


@functools.lru_cache(None)
def fingerprint_of(data):
    """As docs/reference/calibration.md says."""
    blocks = b"".join(data[len(data) // 256 * i :][:4096] for i in range(256))
    return fnv(struct.pack("<Q", len(data)) + blocks)


class Calibration:
    """A file, read by the table in docs/reference/calibration.md."""

    def __init__(self, data):
        self.data = data
        self.magic, version, n, self.bytes, checksum, self.fingerprint, self.tokens, _, name, sets = struct.unpack_from("<8sIIQQQQQII", data)
        assert (self.magic, version, self.bytes, sets) == (b"kvantcal", 2, len(data), 0)
        assert fnv(data[:24] + bytes(8) + data[32:]) == checksum
        self.model = data[64 : 64 + name].decode()
        table = -(-(64 + name) // 64) * 64
        at = -(-(table + 32 * n) // 64) * 64
        self.entries = {}
        for i in range(n):
            layer, role, heads, dim = struct.unpack_from("<4I", data, table + 32 * i)
            row, square = heads * dim, heads * dim * dim
            names = [("mean", row), ("min", row), ("max", row)] + ([("moment", square), ("diagonal", row)] if role == 0 else [])
            entry, start = {"dim": dim, "heads": heads}, at
            for key, n_numbers in names:
                entry[key] = array.array("f", data[at : at + 4 * n_numbers])
                at += 4 * n_numbers
            at += heads * dim * (dim + 1) // 2 * 2 if role == 0 else 0
            self.entries[layer, role] = entry
            at = start + -(-(at - start) // 64) * 64


def difference(a, b):
    """Relative, root mean square."""
    return (sum((x - y) ** 2 for x, y in zip(a, b)) / sum(y * y for y in b)) ** 0.5


class Learning(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.home = pathlib.Path(folder.name)
        self.cache = self.home / ".cache" / "kvant" / "learnt"

    def environment(self, **variables):
        env = {name: value for name, value in os.environ.items() if not name.startswith(("KVANT", "GGML", "LLAMA", "XDG"))}
        env["HOME"] = str(self.home)
        env.update({name: str(value) for name, value in variables.items()})
        return {name: value for name, value in env.items() if value != ""}

    def start(self, *arguments, **variables):
        words = [str(word) for word in (PROBE, *arguments)]
        return subprocess.Popen(words, env=self.environment(**variables), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, **self.process)

    process = {}

    def end(self, program):
        _, said = program.communicate(timeout=300)
        return program.returncode, said

    def run_probe(self, *arguments, **variables):
        status, said = self.end(self.start(*arguments, **variables))
        self.assertEqual(status, 0, said)
        return said

    def waiting(self, *arguments):
        """A program that has read its prompt."""
        program = self.start(*arguments, LEARN_PROBE_WAIT=1)
        self.assertEqual(program.stdout.readline(), "ready\n")
        return program

    def files(self):
        return sorted(path.name for path in self.cache.glob("*")) if self.cache.exists() else []

    def path(self, model=LLAMA):
        return self.cache / f"{fingerprint(model):016x}.kvcal"

    def learn(self, *arguments, **variables):
        said = self.run_probe(LLAMA, LONG, 1, *arguments, **variables)
        self.assertIn(LEARNS, said)
        return said

    def test_the_next_run_uses_what_a_run_learnt(self):
        said = self.learn()
        path = self.path()
        self.assertEqual(self.files(), [path.name])
        self.assertIn(f"kvant: learnt a calibration from 1024 tokens of prompts, which the next run uses: {path}\n", said)
        self.assertEqual(path.parent.stat().st_mode & 0o777, 0o700)
        data = path.read_bytes()
        calibration = Calibration(data)
        self.assertEqual((calibration.fingerprint, calibration.model, calibration.tokens), (fingerprint(LLAMA), "llama.gguf", 1024))
        self.assertEqual(sorted(calibration.entries), [(layer, role) for layer in range(4) for role in range(2)])
        said = self.run_probe(LLAMA, LONG, 2)
        self.assertIn(f"; calibrated by an earlier run: {path}\n", said)
        self.assertNotIn("learn", said.replace("/learnt/", ""))
        self.assertEqual((self.files(), path.read_bytes()), ([path.name], data))

    def test_models_of_other_kinds(self):
        for kind in ("gemma3", "gemma2", "gpt-oss", "llama80"):
            model = TINY / f"{kind}.gguf"
            self.assertIn("learnt a calibration", self.run_probe(model, LONG, 1), kind)
            self.assertIn(f"calibrated by an earlier run: {self.path(model)}", self.run_probe(model, SHORT, 1), kind)

    def test_enough_at_the_end(self):
        self.assertIn("learnt a calibration from 550 tokens", self.run_probe(LLAMA, END, 1))
        self.assertEqual(Calibration(self.path().read_bytes()).tokens, 550)

    def test_too_few_tokens(self):
        self.assertIn(LEARNS, self.run_probe(LLAMA, SHORT, 1))
        self.assertEqual(self.files(), [])

    def test_monotonous_prompts(self):
        self.assertNotIn("learnt", self.run_probe(LLAMA, 8192, "same"))
        self.assertNotIn("learnt", self.run_probe(LLAMA, 8192, "few150"))
        self.assertEqual(self.files(), [])

    def test_turned_off(self):
        self.assertIn(HINT, self.run_probe(LLAMA, LONG, 1, KVANT_LEARN=0))
        self.assertFalse((self.home / ".cache").exists())
        self.learn()
        self.assertIn(HINT, self.run_probe(LLAMA, LONG, 1, KVANT_LEARN=0))
        status, said = self.end(self.start(LLAMA, SHORT, 1, KVANT_LEARN="yes"))
        self.assertEqual(status, 3)
        self.assertIn("KVANT_LEARN=yes is not a whole number from 0 to 1", said)

    def test_codecs_that_were_named_stay(self):
        for variables in ({"KVANT_K": "int-8"}, {"KVANT_K": "trellis-4:center=first,norm=first", "KVANT_V": "trellis-4"}):
            said = self.run_probe(LLAMA, LONG, 1, **variables)
            self.assertNotIn("learn", said)
            self.assertEqual(self.files(), [])

    def test_a_calibration_that_was_named_wins(self):
        self.learn()
        named = shutil.move(self.path(), self.home / "named.kvcal")
        said = self.run_probe(LLAMA, LONG, 2, KVANT_CALIBRATION=named)
        self.assertTrue(said.endswith("; calibrated\n"), said)
        self.assertEqual(self.files(), [])

    def test_a_calibration_beside_the_model_wins(self):
        model = pathlib.Path(shutil.copy(LLAMA, self.home / "model.gguf"))
        self.assertIn("learnt", self.run_probe(model, LONG, 1))
        beside = shutil.copy(self.path(), self.home / "model.kvcal")
        self.assertIn(f"; calibrated: {beside}\n", self.run_probe(model, SHORT, 1))

    def test_models_of_one_name(self):
        models = []
        for i, source in enumerate((LLAMA, TINY / "llama80.gguf")):
            folder = self.home / str(i)
            folder.mkdir()
            models.append(pathlib.Path(shutil.copy(source, folder / "model.gguf")))
            self.assertIn(LEARNS, self.run_probe(models[i], LONG, 1))
        self.assertEqual(len(self.files()), 2)
        for model in models:
            self.assertIn(f"earlier run: {self.path(model)}\n", self.run_probe(model, SHORT, 1))

    def test_a_file_of_another_model_is_not_used(self):
        self.learn()
        other = TINY / "llama80.gguf"
        shutil.copy(self.path(), self.path(other))
        said = self.run_probe(other, LONG, 1)
        self.assertIn(f"kvant: {self.path(other)} is not used: it was made with another model\n", said)
        self.assertIn("learnt a calibration", said)
        self.assertEqual(Calibration(self.path(other).read_bytes()).fingerprint, fingerprint(other))

    def test_a_damaged_file_is_replaced(self):
        self.learn()
        good = self.path().read_bytes()
        self.path().write_bytes(good[: len(good) // 2])
        said = self.run_probe(LLAMA, SHORT, 1)
        self.assertIn(f"kvant: {self.path()} is not used: ", said)
        self.assertIn(LEARNS, said)
        self.learn()
        self.assertEqual(self.path().read_bytes(), good)

    def test_interrupted(self):
        """By a signal that ends a program at once. Too little: nothing. Enough: it is there before the program ends."""
        program = self.waiting(LLAMA, END, 1)
        program.send_signal(signal.SIGINT)
        self.assertEqual(self.end(program)[0], -signal.SIGINT)
        self.assertEqual(self.files(), [])
        program = self.waiting(LLAMA, 2600, 1)  # the batch after the 1024th token that counts begins the work
        until = time.monotonic() + 100
        while not self.path().exists() and time.monotonic() < until:
            time.sleep(0.05)
        program.send_signal(signal.SIGINT)
        self.end(program)
        self.assertEqual((self.files(), Calibration(self.path().read_bytes()).tokens), ([self.path().name], 1024))

    def test_the_first_of_two_programs_wins(self):
        programs = [self.waiting(LLAMA, END, seed) for seed in (1, 2)]
        self.assertIn("learnt", self.end(programs[0])[1])
        data = self.path().read_bytes()
        status, said = self.end(programs[1])
        self.assertEqual((status, self.path().read_bytes(), self.files()), (0, data, [self.path().name]))
        self.assertNotIn("learnt a calibration", said)

    def test_programs_at_once(self):
        programs = [self.start(LLAMA, LONG, seed) for seed in range(4)]
        for program in programs:
            self.assertEqual(self.end(program)[0], 0)
        self.assertEqual(self.files(), [self.path().name])
        self.assertEqual(Calibration(self.path().read_bytes()).tokens, 1024)

    def test_no_place(self):
        (self.home / "file").write_text("")
        for variables in ({"HOME": ""}, {"HOME": "relative"}, {"HOME": "/proc/nowhere"}, {"XDG_CACHE_HOME": self.home / "file"}):
            said = self.run_probe(LLAMA, LONG, 1, **variables)
            self.assertIn(HINT, said)
            self.assertNotIn("learn", said)

    def test_a_home_that_cannot_be_written(self):
        """A file system that is mounted for reading, where the system lets us have one."""
        mounted = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o ro none "$0" && exec "$@"', str(self.home)]
        if subprocess.run([*mounted, "true"], capture_output=True).returncode != 0:
            self.skipTest("needs unshare")
        done = subprocess.run([*mounted, PROBE, LLAMA, str(LONG), "1"], env=self.environment(), capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(HINT, done.stderr)

    def test_a_full_disk(self):
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))  # noqa: E731
        self.process = {"preexec_fn": limit, "restore_signals": False}  # SIGXFSZ stays ignored
        said = self.run_probe(LLAMA, LONG, 1)
        self.assertIn("kvant: what was learnt is not kept: cannot write ", said)
        self.assertEqual(self.files(), [])

    def test_xdg(self):
        self.run_probe(LLAMA, LONG, 1, XDG_CACHE_HOME=self.home / "xdg")
        self.assertEqual([path.name for path in (self.home / "xdg/kvant/learnt").iterdir()], [self.path().name])
        self.learn(XDG_CACHE_HOME="relative/is/ignored")
        self.assertEqual(self.files(), [self.path().name])

    def test_layers_that_stay_uncompressed(self):
        said = self.run_probe(LLAMA, LONG, 1, 3)
        self.assertIn("only 2 of 4 layers have a compressed cache", said)
        self.assertIn(HINT, said)
        self.assertEqual(self.files(), [])

    def test_a_model_that_is_not_mapped(self):
        self.assertIn(HINT, self.run_probe(LLAMA, LONG, 1, 99, "none"))
        self.assertIn("learnt a calibration", self.run_probe(LLAMA, LONG, 1, 99, "none", KVANT_MODEL=LLAMA))
        self.assertIn("earlier run", self.run_probe(LLAMA, LONG, 1, 99, "none", KVANT_MODEL=LLAMA))

    def test_a_calibration_that_does_not_fit_is_given_up(self):
        """As where the variable names another model than the one that is run."""
        self.learn()
        said = self.run_probe(TINY / "llama80.gguf", SHORT, 1, 99, "none", KVANT_MODEL=LLAMA)
        self.assertIn(HINT, said)

    def gpu(self, model=LLAMA):
        return {"KVANT_MODEL": model, "KVANT_TEST_STANDIN": os.environ["LEARN_STANDIN"], "KVANT_CUDA_LIBRARY": os.environ["LEARN_CUDA"],
                "LD_LIBRARY_PATH": os.environ["LEARN_DRIVER"]}

    def test_a_gpu_uses_what_a_cpu_learnt(self):
        self.learn()
        self.assertIn(f"; calibrated by an earlier run: {self.path()}\n", self.run_probe(LLAMA, SHORT, 1, **self.gpu()))

    def test_a_gpu_learns(self):
        """Rows and queries of the CPU's run, except for what a compressed cache errs below the layer at hand."""
        self.learn()
        ours = Calibration(self.path().read_bytes())
        self.path().unlink()
        said = self.learn(**self.gpu())
        self.assertIn(f"kvant: learnt a calibration from 1024 tokens of prompts, which the next run uses: {self.path()}\n", said)
        theirs = Calibration(self.path().read_bytes())
        self.assertEqual((theirs.fingerprint, theirs.model, theirs.tokens), (ours.fingerprint, ours.model, 1024))
        self.assertEqual(sorted(theirs.entries), sorted(ours.entries))
        for place, entry in ours.entries.items():
            for key in ("mean", "min", "max", "moment"):
                if key in entry:
                    self.assertLess(difference(theirs.entries[place][key], entry[key]), 0.2 if place[0] else 1e-5, (place, key))
        self.assertIn(f"; calibrated by an earlier run: {self.path()}\n", self.run_probe(LLAMA, SHORT, 1, **self.gpu()))

    def test_a_gpu_learns_at_the_end_and_when_it_may(self):
        self.assertIn(HINT, self.run_probe(LLAMA, LONG, 1, KVANT_LEARN=0, **self.gpu()))
        self.assertIn(HINT, self.run_probe(LLAMA, LONG, 1, 3, **self.gpu()))
        self.assertEqual(self.files(), [])
        self.assertIn("learnt a calibration from 550 tokens", self.run_probe(LLAMA, END, 1, **self.gpu()))

    def first_keys(self, tokens, on_gpu):
        """Rows that a cache has of the first layer's keys after a prompt."""
        small, path = pathlib.Path(os.environ["KVANT_SMALL_MODEL"]), self.home / "state"
        variables = dict(self.gpu(small)) if on_gpu else {}
        self.run_probe(small, tokens, os.environ["KVANT_TEXT"], KVANT_LEARN=0, LEARN_PROBE_STATE=path, KVANT_V="trellis-4",
                       KVANT_K="trellis-4:transform=first,sink=0", **variables)
        data, width, layers = path.read_bytes(), 3 * 64, 4
        bytes_each = 2 * tokens * width
        at = len(data) - 2 * layers * bytes_each - (2 * layers - 1) * 12  # each tensor has its type and a row's bytes in front
        numbers = struct.unpack_from(f"<{tokens * width}e", data, at)
        return [numbers[i : i + width] for i in range(0, len(numbers), width)]

    def test_matrices_of_first_rows_are_the_same_on_a_gpu(self):
        """The first layer's keys and queries are the same on both devices, so are centre, matrix and codes: decoding rounds in another
        order. A GPU has one version, the last one: in a longer prompt rows before the 512th have another on the CPU."""
        for tokens, since in ((400, 0), (1100, 512)):
            cpu, gpu = (self.first_keys(tokens, on_gpu) for on_gpu in (False, True))
            for token in range(since, tokens):
                self.assertLess(difference(gpu[token], cpu[token]), 1e-3, (tokens, token))
            for token in range(since):
                self.assertLess(difference(gpu[token], cpu[token]), 0.3, (tokens, token))

    def test_statistics_are_those_that_kvant_calibrate_gathers(self):
        """Of the same text: every second token, and a query head in turn, beside all of them."""
        small, text, other = (pathlib.Path(os.environ[name]) for name in ("KVANT_SMALL_MODEL", "KVANT_TEXT", "KVANT_SMALL_KVCAL"))
        self.assertIn("learnt a calibration from 512 tokens", self.run_probe(small, 1026, text))
        ours, whole = Calibration(self.path(small).read_bytes()), Calibration(other.read_bytes())
        self.assertEqual(sorted(ours.entries), sorted(whole.entries))
        for place, entry in whole.entries.items():
            mine = ours.entries[place]
            self.assertEqual((mine["heads"], mine["dim"]), (entry["heads"], entry["dim"]))
            for key, most in (("mean", 0.2 if place[1] else 0.05), ("moment", 0.15), ("diagonal", 0.5)):
                if key in entry:
                    self.assertLess(difference(mine[key], entry[key]), most, (place, key))


if __name__ == "__main__":
    unittest.main()
