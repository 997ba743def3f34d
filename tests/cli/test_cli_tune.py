"""kvant tune with a model: it keeps a budget, writes the settings file that it reports, resumes an
interrupted run, and names mistakes.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from test_cli_calibrate import HEAD_DIM, N_KV_HEADS
from testing import LIB, N_LAYERS, ON_SMALL, SMALL, TEXT, command, program, run, temporary_folder

OK, RUNTIME, USAGE, INTERRUPTED = 0, 1, 2, 130
# One context is measured, to save time. tests/tuning/test_probes.py tests which contexts of several
# texts are measured.
CTX, PROBE, PROBE_CHUNKS = 4096, 640, 1
MEASUREMENTS = PROBE_CHUNKS * (
    N_LAYERS + -(-N_LAYERS // 4) + 2
)  # every layer, the keys of some layers, no codec, and llama.cpp's own f16
# Bits of turboquant at head_dim 64: a row has a scale of 16 bits.
CANDIDATES = {f"turboquant-{bits}": bits + 0.25 for bits in (2, 3, 4)}
# A cache of 4096 tokens has fp16 pages for 4 of its 64 blocks. They are the first block, and three
# for the newest 128 tokens. The 512 rows of a step need 8 more pages, once for the keys of all
# layers and once for the values.
OWN = 16 * 4 / 64
EXACT = OWN + 16 * 8 / 64 / N_LAYERS
TRY = [word for spec in CANDIDATES for word in ("--try-k", spec, "--try-v", spec)]


def of_heads(spec):
    """The codec of each kv head, from the output about a layer."""
    specs = spec.split(" | ")
    return specs * N_KV_HEADS if len(specs) == 1 else specs


class Tune(unittest.TestCase):
    """All tests share one state file, so the measurements of the first run serve the later runs."""

    @classmethod
    def setUpClass(cls):
        cls.folder = temporary_folder(cls.addClassCleanup)
        cls.path = cls.folder / "model.kvant"
        cls.state = cls.path.with_name("state")
        cls.base = ["tune", *ON_SMALL, "-c", CTX, "--probe-ctx", PROBE, "--chunks", 2, *TRY]
        cls.base += ["--probe-chunks", PROBE_CHUNKS]
        words = [*cls.base, "--bits", 3 + EXACT, "-o", cls.path, "--resume", cls.state]
        cls.interrupted = cls.interrupt(words)
        cls.left = sorted(p.name for p in cls.path.parent.iterdir())
        cls.done = run(*words, "--json", timeout=600, code=OK)
        rows = json.loads(cls.done.stdout)
        cls.settings = [row for row in rows if row["setting"] is not None]
        cls.sites = [row for row in rows if row["setting"] is None]

    @classmethod
    def interrupt(cls, arguments):
        """Ctrl-C when some of the measurements are done."""
        process = subprocess.Popen(
            command(*arguments, "--runtime", LIB), stderr=subprocess.PIPE, text=True
        )
        for _ in range(1200):
            if cls.state.exists() and cls.state.stat().st_size > 1024 or process.poll() is not None:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
        return process.returncode, stderr

    def test_an_interrupted_run_goes_on(self):
        code, stderr = self.interrupted
        self.assertEqual(code, INTERRUPTED, stderr)
        self.assertIn(str(self.state), stderr)
        self.assertIn("state", self.left)
        self.assertLessEqual(
            set(self.left), {"state", "state.check", "state.errors"}
        )  # no settings file, and no temporary file
        self.assertRegex(self.done.stderr, rf"continues from .*: [1-9]\d* of {MEASUREMENTS} chunks")

    def test_the_budget_is_kept_and_used(self):
        self.assertEqual(len(self.sites), 2 * N_LAYERS)
        self.assertEqual(
            {(s["layer"], s["role"]) for s in self.sites},
            {(i, r) for i in range(N_LAYERS) for r in "KV"},
        )
        for site in self.sites:
            bits = [CANDIDATES[spec] for spec in of_heads(site["spec"])]
            self.assertEqual(len(bits), N_KV_HEADS)
            self.assertAlmostEqual(site["site_bits"], OWN + sum(bits) / N_KV_HEADS, places=9)
        tuned = self.settings[0]
        self.assertEqual(tuned["setting"], "tuned")
        mean = sum(site["site_bits"] for site in self.sites) / len(self.sites) + EXACT - OWN
        self.assertAlmostEqual(tuned["bits"], mean, places=6)
        self.assertAlmostEqual(
            tuned["kv_bytes"], mean / 8 * 2 * N_LAYERS * N_KV_HEADS * HEAD_DIM * CTX, places=3
        )
        # A step is at most a bit of one site. The unused bits are less than one step.
        self.assertTrue(3 - 1 / len(self.sites) < tuned["bits"] - EXACT <= 3)

    def test_probes_see_rows_that_were_encoded(self):
        """A layer's candidate of 2 bits costs more than two standard errors. If probes saw only
        fp16 rows, chance would do that in one layer of 40. The test demands it of half of the
        layers.
        """
        seen = 0
        for layer in range(N_LAYERS):
            both = [site for site in self.sites if site["layer"] == layer]
            cost, error = (sum(site[name] for site in both) for name in ("probe_kld", "probe_se"))
            seen += cost > 2 * error
        self.assertGreater(seen, N_LAYERS / 2)

    def test_predictions(self):
        """More bits never cost more. The chosen setting is predicted to be better than every
        uniform setting of its size.
        """
        for site in self.sites:
            self.assertGreater(site["cost"], 0)
            self.assertTrue(0 < site["error"] < 1)
            self.assertGreater(
                site["probe_error"], 0
            )  # keys of 1 bit may lead attention elsewhere: the error exceeds the output
        tuned, *uniform = self.settings
        self.assertGreaterEqual(len(uniform), 1)
        for setting in uniform:
            self.assertIn(setting["k"], CANDIDATES)
            if setting["bits"] <= 3 + EXACT:
                self.assertLess(tuned["predicted"], setting["predicted"])
        for setting in self.settings:
            self.assertGreater(setting["kld_mean"], 0)

    def test_the_file_is_what_was_said(self):
        said = {(layer, role): [None] * N_KV_HEADS for layer in range(N_LAYERS) for role in "KV"}
        for line in self.path.read_text().splitlines():
            match line.split():
                case [("k" | "v") as role, layers, shape, spec]:
                    self.assertEqual(shape, f"{N_KV_HEADS}x{HEAD_DIM}")
                    for part in layers.split(","):
                        layers, _, head = part.partition("/")
                        first, _, last = layers.partition("-")
                        heads = [int(head)] if head else range(N_KV_HEADS)
                        for layer in range(int(first), int(last or first) + 1):
                            for h in heads:
                                said[layer, role.upper()][h] = spec
        self.assertEqual(
            said, {(site["layer"], site["role"]): of_heads(site["spec"]) for site in self.sites}
        )
        self.assertTrue(
            any("|" in site["spec"] for site in self.sites), "no kv head has a codec of its own"
        )
        shown = run("codecs", "--config", self.path, "--json", code=OK)
        for row in json.loads(shown.stdout):
            self.assertEqual(of_heads(row["k"]), said[row["layer"], "K"])
            self.assertEqual(of_heads(row["v"]), said[row["layer"], "V"])
        done = run(
            "eval", *ON_SMALL, "-c", 128, "--chunks", 1, "--config", self.path, "--json", code=OK
        )
        row = next(row for row in json.loads(done.stdout) if row["cache"] == "kvant")
        self.assertAlmostEqual(row["bits"], self.settings[0]["bits"] - EXACT, places=6)

    def test_the_bytes_are_those_that_kvant_inspect_tells(self):
        done = run("inspect", "-m", SMALL, "-c", CTX, "--config", self.path, "--json", code=OK)
        (row,) = (row for row in json.loads(done.stdout) if row["filled"] == 100)
        self.assertEqual(row["kv_bytes"], self.settings[0]["kv_bytes"])
        self.assertEqual(row["cache_bits"], self.settings[0]["bits"])

    def test_measurements_serve_another_budget(self):
        path = self.path.with_name("other.kvant")
        n_bytes = (3.5 + EXACT) / 8 * 2 * N_LAYERS * N_KV_HEADS * HEAD_DIM * CTX
        done = run(*self.base, "--kv-bytes", n_bytes, "-o", path, "--resume", self.state, code=OK)
        self.assertIn(f"{MEASUREMENTS} of {MEASUREMENTS} chunks", done.stderr)
        # errors are on disk, so nothing is captured
        self.assertNotIn("reading the text", done.stderr)
        self.assertIn("uniform", done.stdout)
        self.assertTrue(path.exists())

    def test_without_a_resume_file_the_cache_folder_keeps_what_was_measured(self):
        """With --chunks 0 no check is made."""
        cache = self.path.with_name("cache")
        self.addCleanup(shutil.rmtree, cache)
        arguments = [*self.base, "--chunks", 0, "-o", self.path.with_name("third.kvant"), "--json"]
        rows = [
            json.loads(run(*arguments, "--bits", bits + EXACT, XDG_CACHE_HOME=str(cache)).stdout)
            for bits in (3, 3.5)
        ]
        self.assertEqual([found[0]["setting"] for found in rows], ["tuned", "tuned"])
        self.assertEqual(
            [row["kld_mean"] for row in rows[1] if row["setting"]],
            [None] * sum(bool(row["setting"]) for row in rows[1]),
        )
        files = list((cache / "kvant" / "tune").iterdir())
        self.assertEqual(sorted(file.suffix for file in files), ["", ".errors"])
        again = run(*arguments, "--bits", 3 + EXACT, XDG_CACHE_HOME=str(cache))
        self.assertEqual(json.loads(again.stdout), rows[0])
        self.assertIn(f"{MEASUREMENTS} of {MEASUREMENTS} chunks", again.stderr)

    def test_a_budget_that_is_too_small(self):
        path = self.path.with_name("none.kvant")
        done = run(*self.base, "--bits", 1, "-o", path, "--resume", self.state, code=RUNTIME)
        self.assertIn(f"{2.25 + EXACT:.2f} bits", done.stderr)
        self.assertFalse(path.exists())


class Mistakes(unittest.TestCase):
    def test_the_calibration_beside_the_model_is_found(self):
        """A candidate that needs a calibration uses the file. A candidate that cannot be made ends
        the command before it measures.
        """
        model = temporary_folder(self.addCleanup) / "model.gguf"
        model.symlink_to(SMALL)
        arguments = ["tune", "-m", model, "-f", TEXT, "-o", model.with_name("x"), "--bits", 4]
        arguments += ["--probe-ctx", 640, "--try-k", "int-4:center=file", "--try-v", "nonsense-4"]
        done = run(*arguments, code=USAGE)
        self.assertIn("--try-k int-4:center=file", done.stderr)
        beside = model.with_name("model.kvcal")
        done = run(
            "calibrate",
            "-m",
            model,
            "-f",
            TEXT,
            "-n",
            64,
            "-c",
            64,
            "--clusters",
            "none",
            "-o",
            beside,
            code=OK,
        )
        done = run(*arguments, code=USAGE)
        self.assertIn(f"using the calibration {beside}", done.stderr)
        self.assertIn("--try-v nonsense-4", done.stderr)

    def test_numpy_is_named_when_it_is_missing(self):
        with tempfile.TemporaryDirectory() as folder:
            python = program(
                folder, "python3", f'exec "{sys.executable}" -S -s "$@"'
            )  # without site-packages
            if (
                subprocess.run([python, "-c", "import numpy"], stderr=subprocess.DEVNULL).returncode
                == 0
            ):
                self.skipTest("NumPy lies where every Python finds it")
            done = run(
                "tune", *ON_SMALL, "--bits", 4, "-o", f"{folder}/x", KVANT_PYTHON=str(python)
            )
        self.assertEqual(done.returncode, RUNTIME, done.stderr)
        self.assertIn("python3-numpy", done.stderr)

    def test_mistakes_are_named(self):
        path = temporary_folder(self.addCleanup) / "model.kvant"
        broken = path.with_name("broken.gguf")
        with open(SMALL, "rb") as model:
            broken.write_bytes(model.read(1 << 20))
        short = path.with_name("short.txt")
        short.write_text("Too short.")
        full = str(path.with_name("full"))
        os.symlink("/dev/full", full)
        base = ["tune", *ON_SMALL, "-o", path.with_name("x.kvant"), "--bits", "4"]
        for arguments, code, words in [
            (["tune", "-f", TEXT, "--bits", "4"], USAGE, "no model"),
            (["tune", "-m", SMALL, "--bits", "4"], USAGE, "no text"),
            (base[:-2], USAGE, "no budget"),
            ([*base[:5], "-o", path.parent, *base[7:]], RUNTIME, "is a folder"),
            ([*base, "--kv-bytes", "64M"], USAGE, "one of them"),
            ([*base[:-1], "17"], USAGE, "--bits"),
            ([*base[:-2], "--kv-bytes", "12Q"], USAGE, "--kv-bytes"),
            ([*base, "--try-k", "nonsense-4"], USAGE, "nonsense"),
            ([*base, "--try-k", "int-4:center=file"], USAGE, "--try-k"),
            ([*base, "--calibration", "/nonexistent"], USAGE, "/nonexistent"),
            ([*base, "-c", "100000"], RUNTIME, "longer than the model's limit of"),
            ([*base[:3], "-f", short, *base[5:]], RUNTIME, "are needed"),
            ([*base, "--probe-ctx", "640", "-f", short], RUNTIME, "short.txt has"),
            ([*base, "--report-text", short, "--probe-ctx", "640"], RUNTIME, "are needed"),
            (["tune", "-m", broken, *base[3:]], RUNTIME, "cannot load the model"),
            ([*base[:5], "-o", "/nonexistent/file", *base[7:]], RUNTIME, "/nonexistent"),
            (
                [*base, "--probe-ctx", "512"],
                RUNTIME,
                "keeps as fp16\n  hint: choose a longer context: --probe-ctx 640\n",
            ),
            ([*base, "-c", "512"], RUNTIME, "--probe-ctx 640"),
            ([*base, "--probe-ctx", "640", "--resume", full, *TRY], RUNTIME, full),
            (
                [*base, "--probe-ctx", "640", "--resume", "/nonexistent/state", *TRY],
                RUNTIME,
                "/nonexistent/state",
            ),
        ]:
            with self.subTest(arguments=arguments):
                done = run(*arguments, code=code)
                self.assertIn(words, done.stderr)
        self.assertEqual(list(path.parent.glob("x.kvant*")), [])


if __name__ == "__main__":
    unittest.main()
