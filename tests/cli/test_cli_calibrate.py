"""kvant calibrate with a model: the file, the quality of the statistics, and no half-written file
after any end.
"""

import cmath
import json
import pathlib
import signal
import struct
import subprocess
import tempfile
import unittest

import settings
from testing import LIB, N_LAYERS, ON_SMALL, PAPERS, SMALL, TEXT, command, run, temporary_folder

OK, RUNTIME, USAGE, INTERRUPTED = 0, 1, 2, 130
# SmolLM2-135M-Instruct: query heads, kv heads, head_dim.
N_HEADS, N_KV_HEADS, HEAD_DIM = 9, 3, 64
TOKENS, CLUSTERS = 192, 4


def parse(data):
    """Sites of a calibration file, {(layer, role): {name: floats}}, read by calibration.md
    alone.
    """

    def padded(n):
        return (n + 63) // 64 * 64

    magic, version, n_locations, size = struct.unpack_from("<8sIIQ", data)
    name_bytes, n_sets = struct.unpack_from("<II", data, 56)
    clusters = struct.unpack_from(f"<{n_sets}I", data, 64)
    assert (magic, version, size) == (b"kvantcal", 2, len(data))
    table = padded(64 + 4 * n_sets + name_bytes)
    at, sites = padded(table + 32 * n_locations), {}
    for i in range(n_locations):
        layer, role, heads, dim = struct.unpack_from("<IIII", data, table + 32 * i)
        row = heads * dim
        arrays = {"mean": (row, "f"), "min": (row, "f"), "max": (row, "f")}
        if role == 0:
            arrays |= {
                "moment": (row * dim, "f"),
                "diagonal": (row, "f"),
                "matrix": (row * (dim + 1) // 2, "e"),
            }
        arrays |= {c: (row * c, "f") for c in clusters}
        site, start = {"heads": heads, "dim": dim}, at
        for key, (n, kind) in arrays.items():
            site[key] = struct.unpack_from(f"<{n}{kind}", data, at)
            at += (n * struct.calcsize(kind) + 3) // 4 * 4
        at = start + padded(at - start)
        sites[layer, role] = site
    assert at == len(data)
    return sites


class Calibrate(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = temporary_folder(cls.addClassCleanup)
        cls.path = cls.folder / "model.kvcal"
        cls.arguments = ["calibrate", *ON_SMALL, "-n", TOKENS, "-c", 128, "--clusters", CLUSTERS]
        cls.done = run(*cls.arguments, "-o", cls.path, "--json", code=OK)
        cls.data = cls.path.read_bytes()

    def test_summary(self):
        (row,) = json.loads(self.done.stdout)
        self.assertEqual(row["file"], str(self.path))
        self.assertEqual(
            (row["layers"], row["kv_heads"], row["head_dim"], row["tokens"], row["clusters"]),
            (N_LAYERS, N_KV_HEADS, HEAD_DIM, TOKENS, str(CLUSTERS)),
        )
        self.assertEqual(row["bytes"], len(self.data))
        self.assertIn(
            f"hint: use it with --calibration {self.path}; commands find a calibration by ",
            self.done.stderr,
        )
        shares = [
            json.loads(line)["fraction"]
            for line in self.done.stderr.splitlines()
            if line.startswith("{")
        ]
        self.assertEqual((shares[0], shares[-1], shares), (0, 1, sorted(shares)))
        self.assertGreater(row["seconds"], 0)

    def sites(self, *arguments):
        path = self.folder / "other.kvcal"
        run(
            "calibrate",
            *ON_SMALL,
            "-c",
            128,
            "--clusters",
            CLUSTERS,
            *arguments,
            "-o",
            path,
            code=OK,
        )
        return parse(path.read_bytes())

    def test_positions(self):
        """The second of two contexts begins at 1024 - 128, so RoPE rotates its keys by as much
        more, pair by pair (frequencies of SmolLM2, base 100000). Values do not change. The test
        looks only at the first layer, because rows of later layers have been through attention,
        whose roundings differ between positions. Both numbers of a pair are rounded to fp16, by
        2^-11 sqrt(2) each.
        """
        once = parse(self.data)
        first = self.sites("-n", 128)
        spread = self.sites("-n", TOKENS, "--positions", 1024)
        self.assertEqual(self.sites("-n", TOKENS, "--positions", 128), once)
        for layer, role in ((0, 0), (0, 1)):
            site = once[layer, role]
            wanted = list(site["mean"])
            if role == 0:
                for i in range(0, N_KV_HEADS * HEAD_DIM, 2):
                    rest = complex(
                        *(
                            TOKENS * site["mean"][j] - 128 * first[layer, 0]["mean"][j]
                            for j in (i, i + 1)
                        )
                    )
                    turned = rest * cmath.exp(1j * 896 * 100000 ** -(i % HEAD_DIM / HEAD_DIM))
                    wanted[i] += (turned - rest).real / TOKENS
                    wanted[i + 1] += (turned - rest).imag / TOKENS
                self.assertGreater(max(abs(x - y) for x, y in zip(wanted, site["mean"])), 0.1)
            largest = max(max(map(abs, site["min"])), max(site["max"]))
            for x, y in zip(spread[layer, role]["mean"], wanted):
                self.assertAlmostEqual(x, y, delta=2**-9 * largest)

    def beside(self, data):
        """A folder with the model and this calibration, as users have it."""
        folder = temporary_folder(self.addCleanup)
        model = folder / "model.gguf"
        model.symlink_to(SMALL)
        (folder / "model.kvcal").write_bytes(data)
        return model

    def eval(self, model, *options):
        return run("eval", "-m", model, "-f", TEXT, "-c", 64, "--chunks", 1, "--json", *options)

    def test_a_calibration_beside_the_model_is_used_by_itself(self):
        model = self.beside(self.data)
        found = str(model.with_suffix(".kvcal"))
        for options, keys in (
            ([], "trellis-4:transform=file"),
            (["--preset", "small"], "trellis-3:transform=file"),
            (["-k", "int-4:center=file"], "int-4:center=file"),
        ):
            done = self.eval(model, *options)
            self.assertEqual(done.returncode, OK, done.stderr)
            self.assertIn(f"using the calibration {found}\n", done.stderr)
            row = json.loads(done.stdout)[1]
            self.assertEqual((row["k"], row["calibration"]), (keys, found))
        done = self.eval(model, "-k", "int-4")
        self.assertNotIn("calibration", done.stderr)
        self.assertIsNone(json.loads(done.stdout)[1]["calibration"])
        done = run("exec", "env", "-u", "A", "-m", model)
        self.assertIn(f"using the calibration {found}\n", done.stderr)

    def test_a_calibration_beside_of_another_file_is_not_used(self):
        other = bytearray(self.data)
        other[32] ^= 1  # the model's fingerprint
        checksum = 0xCBF29CE484222325
        for byte in other[:24] + bytes(8) + other[32:]:
            checksum = (checksum ^ byte) * 0x100000001B3 % 2**64
        struct.pack_into("<Q", other, 24, checksum)
        model = self.beside(other)
        done = self.eval(model)
        self.assertEqual(done.returncode, OK, done.stderr)
        self.assertIn("is not used: it was made with another file than model.gguf", done.stderr)
        self.assertEqual(json.loads(done.stdout)[1]["k"], "trellis-4:transform=first")

    def test_a_settings_file_takes_its_own_calibration_only(self):
        folder = pathlib.Path(self.beside(self.data).parent)
        checksum = struct.unpack_from("<Q", self.data, 24)[0]
        for stated, code, said in (
            (checksum, OK, ""),
            (checksum ^ 1, USAGE, "not the one that the settings were made"),
        ):
            path = folder / "model.kvant"
            path.write_text(
                settings.seal(
                    f"kvant-settings 1\nlayers {N_LAYERS}\ncalibration {stated:016x} model.kvcal\n"
                    f"k 0-{N_LAYERS - 1} 3x64 trellis-4:transform=file\n"
                    f"v 0-{N_LAYERS - 1} 3x64 trellis-4:center=file\n"
                )
            )
            done = self.eval(SMALL, "--config", path)
            self.assertEqual(done.returncode, code, done.stderr)
            self.assertIn(said, done.stderr)
            if code == OK:
                row = json.loads(done.stdout)[1]
                same = json.loads(
                    self.eval(
                        SMALL,
                        "--calibration",
                        self.path,
                        *"-k trellis-4:transform=file -v trellis-4:center=file".split(),
                    ).stdout
                )[1]
                self.assertEqual(row["kld_mean"], same["kld_mean"])
                self.assertEqual(row["bits"], same["bits"])

    def test_statistics_hang_together(self):
        sites = parse(self.data)
        self.assertEqual(
            set(sites), {(layer, role) for layer in range(N_LAYERS) for role in (0, 1)}
        )
        for (layer, role), site in sites.items():
            self.assertEqual((site["heads"], site["dim"]), (N_KV_HEADS, HEAD_DIM))
            for low, mean, high in zip(site["min"], site["mean"], site["max"]):
                self.assertTrue(low <= mean <= high and low < high)
            # A centroid is a mean of keys or values.
            for i, x in enumerate(site[CLUSTERS]):
                channel = i // (CLUSTERS * HEAD_DIM) * HEAD_DIM + i % HEAD_DIM
                slack = 2**-10 * max(
                    abs(site["min"][channel]), abs(site["max"][channel])
                )  # rows are kept as fp16
                self.assertTrue(site["min"][channel] - slack <= x <= site["max"][channel] + slack)
            if role == 0:  # a second moment: symmetric, and |S_ij| <= sqrt(S_ii S_jj)
                for head in range(N_KV_HEADS):
                    at = head * HEAD_DIM**2
                    moment = site["moment"][at : at + HEAD_DIM**2]
                    for i in range(HEAD_DIM):
                        self.assertGreater(moment[i * HEAD_DIM + i], 0)
                        for j in range(i):
                            x = moment[i * HEAD_DIM + j]
                            self.assertEqual(x, moment[j * HEAD_DIM + i])
                            bound = moment[i * HEAD_DIM + i] * moment[j * HEAD_DIM + j]
                            self.assertLessEqual(x * x, bound * (1 + 1e-5))
                # Diagonals of positive definite matrices are positive. A model's matrix is not the
                # identity.
                diagonal = [site["matrix"][i * (i + 3) // 2] for i in range(HEAD_DIM)]
                self.assertGreater(min(*diagonal, *site["diagonal"]), 0)
                self.assertNotEqual(set(diagonal), {1.0})

    def test_calibrated_codecs_run(self):
        """The calibrated codecs in llama.cpp: the quality is of the order of 4-bit codecs, and
        sizes count the index.
        """
        bits = {
            "int-4:center=file": 4.5,
            "turboquant-4:transform=file": 4.375,
            "turboquant-4:transform=diagonal": 4.375,
        }
        if PAPERS:
            bits |= {"hessian-4": 4.5, f"kmeans-4:c={CLUSTERS},block=64": 4.5625}
        specs = list(bits)
        configs = [word for spec in specs for word in ("-k", spec, "-v", "int-4")]
        done = run(
            *["eval", *ON_SMALL, "-c", 128, "--chunks", 1, "--json"],
            *["--calibration", self.path, *configs],
            code=OK,
        )
        rows = {row["k"]: row for row in json.loads(done.stdout) if row["cache"] == "kvant"}
        self.assertEqual(list(rows), specs)
        self.assertEqual([row["bits"] for row in rows.values()], list(bits.values()))
        # A wrong rotation or centroid costs nats. int-4 measures about 0.1 with this model
        # (bench/results).
        for spec, row in rows.items():
            self.assertTrue(0 < row["kld_mean"] < 0.5, (spec, row["kld_mean"]))

    def test_matrices_of_a_calibration_are_counted(self):
        """Each kv head has W and its inverse in fp32, and perhaps a centre and a scale. The
        predicted size counts them, and so does the measured size.
        """
        matrices = N_LAYERS * N_KV_HEADS * 2 * HEAD_DIM**2 * 4
        vectors = N_LAYERS * N_KV_HEADS * 2 * HEAD_DIM * 4
        cache = ["--calibration", self.path, "-k", "turboquant-4:transform=file", "-v", "int-4"]
        done = run("inspect", "-m", SMALL, *cache, "-c", 256, "--json", code=OK)
        for row in json.loads(done.stdout):  # a calibration is loaded from the beginning
            self.assertGreaterEqual(row["transform_bytes"], matrices)
            self.assertLessEqual(row["transform_bytes"], matrices + vectors)
        done = run("eval", *ON_SMALL, "-c", 256, "--chunks", 1, "--json", *cache, code=OK)
        measured = json.loads(done.stdout)[1]
        numbers = 2 * 256 * N_LAYERS * N_KV_HEADS * HEAD_DIM
        self.assertGreaterEqual(measured["kv_bytes"], numbers * measured["bits"] / 8 + matrices)

    def test_missing_and_wrong_calibrations_are_named(self):
        arguments = ["eval", *ON_SMALL, "-c", 128, "--chunks", 1]
        for spec in (
            "int-4:center=file",
            "turboquant-4:transform=file",
            *(("hessian-4", "kmeans-4:c=4") if PAPERS else ()),
        ):
            done = run(*arguments, "-k", spec, code=USAGE)
            self.assertIn("kvant calibrate", done.stderr)
            self.assertIn("--calibration", done.stderr)
        if PAPERS:
            done = run(*arguments, "-k", "kmeans-4", "--calibration", self.path, code=USAGE)
            self.assertIn("--clusters 256", done.stderr)
        broken = self.folder.parent / f"{self.path.parent.name}-broken"
        broken.write_bytes(self.data[:-1])
        try:
            done = run(*arguments, "-k", "int-4:center=file", "--calibration", broken, code=USAGE)
            self.assertIn("cut short", done.stderr)
        finally:
            broken.unlink()

    def interrupt(self, arguments):
        """Interrupts the command when the first batch was gathered."""
        process = subprocess.Popen(
            command(*arguments, "--json", "--runtime", LIB), stderr=subprocess.PIPE, text=True
        )
        for line in process.stderr:
            if line.startswith("{") and json.loads(line)["done"] > 0:
                break
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
        self.assertEqual(process.returncode, INTERRUPTED, stderr)
        return stderr

    def test_an_interrupted_run_goes_on(self):
        """After an interruption the old file and the work are still there, and the resumed command
        makes the same file as a single run. A context takes two batches.
        """
        arguments = [*self.arguments, "-n", 3968, "-c", 640, "-t", 1, "-o"]
        with tempfile.TemporaryDirectory() as name:
            whole, broken = (pathlib.Path(name) / f"{kind}.kvcal" for kind in ("whole", "broken"))
            part = broken.with_name("broken.kvcal.part")
            self.assertIn(str(part), self.interrupt([*arguments, broken]))
            self.assertEqual([p.name for p in broken.parent.iterdir() if p != broken], [part.name])
            broken.write_bytes(self.data)
            done = run(*arguments, broken, code=OK)
            self.assertIn("of 3968 tokens", done.stderr)
            self.assertFalse(part.exists())
            self.assertEqual(run(*arguments, whole).returncode, OK)
            self.assertEqual(broken.read_bytes(), whole.read_bytes())

    def test_mistakes_are_named(self):
        base = ["calibrate", *ON_SMALL, "-o", self.path]
        for arguments, code, words in [
            (["calibrate", "-f", TEXT, "-o", self.path], USAGE, "no model"),
            (["calibrate", "-m", SMALL, "-o", self.path], USAGE, "no text"),
            ([*base, "--clusters", "1"], USAGE, "--clusters"),
            ([*base, "--clusters", "16,x"], USAGE, "--clusters"),
            ([*base, "--clusters", "64", "--sample", "32"], USAGE, "--sample"),
            ([*base, "-n", "64", "--clusters", "256"], RUNTIME, "256 are needed"),
            (
                ["calibrate", *ON_SMALL, "-o", "/nonexistent/file"],
                RUNTIME,
                "/nonexistent",
            ),
            (
                ["calibrate", *ON_SMALL, "-o", self.path.parent],
                RUNTIME,
                f"calibrate: {self.path.parent} is a folder",
            ),
            (
                ["calibrate", "-m", SMALL, "-f", "/nonexistent", "-o", self.path],
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
