"""kvant eval: resuming after an interruption, the f16 run on disk, several texts, positions,
CSV.
"""

import csv
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

from testing import N_VOCABULARY, PLUGIN, SMALL, TEXT, command, rows_of, run, temporary_folder

OK, RUNTIME, USAGE, INTERRUPTED = 0, 1, 2, 130
BASE = ["eval", "-m", SMALL, "-f", TEXT, "-c", "64"]
CONFIGS = ["-k", "turboquant-3", "--stock", "q4_0"]
N_ROWS, VALUE_BYTES = 31, 24
BASE_BYTES = N_ROWS * N_VOCABULARY * 2  # size of a chunk's f16 run on disk
RECORD_BYTES = 24 + N_ROWS * VALUE_BYTES + 8


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


class Kept(unittest.TestCase):
    """One run that keeps everything. Every test starts from copies of its files."""

    @classmethod
    def setUpClass(cls):
        cls.origin = folder = temporary_folder(cls.addClassCleanup)
        cls.rows = rows_of(cls.eval(folder, "--chunks", "2", *CONFIGS))
        cls.header = (folder / "state").stat().st_size - 2 * 3 * RECORD_BYTES

    def setUp(self):
        self.folder = temporary_folder(self.addCleanup) / "copy"
        shutil.copytree(self.origin, self.folder)
        self.state = self.folder / "state"
        self.bases = sorted((self.folder / "bases").iterdir())

    @staticmethod
    def eval(folder, *more):
        return run(
            *BASE, "--resume", folder / "state", "--base-cache", folder / "bases", "--json", *more
        )

    def again(self, *more):
        return self.eval(self.folder, "--chunks", "2", *CONFIGS, *more)

    def test_what_is_kept(self):
        self.assertEqual(self.rows, rows_of(run(*BASE, "--chunks", "2", *CONFIGS, "--json")))
        self.assertEqual(len(self.bases), 2)
        for path in self.bases:
            self.assertGreater(path.stat().st_size, BASE_BYTES)
            self.assertLess(path.stat().st_size, BASE_BYTES + 2000)

    def test_nothing_is_computed_again(self):
        done = self.again()
        self.assertEqual(rows_of(done), self.rows)
        self.assertIn("6 of 6 chunks and configurations are done", done.stderr)
        events = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
        self.assertEqual([event["total"] for event in events], [0, 0])

    def test_another_configuration_uses_both(self):
        done = self.eval(self.folder, "--chunks", "2", "--stock", "q8_0", *CONFIGS)
        rows = rows_of(done)
        self.assertIn("6 of 8", done.stderr)
        self.assertEqual(json.loads(done.stderr.splitlines()[-1])["total"], 2 * 64)
        self.assertEqual(
            [row["kld_mean"] for row in (rows[0], *rows[2:])],
            [row["kld_mean"] for row in self.rows],
        )
        fresh = rows_of(run(*BASE, "--chunks", "2", "--stock", "q8_0", "--json"))
        self.assertEqual(rows[1], fresh[1])

    def test_damaged_records_are_done_again(self):
        flip(self.state, self.header + 2 * RECORD_BYTES + 100)
        done = self.again()
        self.assertEqual(rows_of(done), self.rows)
        self.assertIn("1 damaged records are computed again", done.stderr)
        self.assertIn("5 of 6", done.stderr)

    def test_a_torn_record_is_cut_off(self):
        self.state.write_bytes(self.state.read_bytes()[:-5])
        done = self.again()
        self.assertEqual(rows_of(done), self.rows)
        self.assertIn("5 of 6", done.stderr)
        self.assertEqual(self.state.stat().st_size, self.header + 6 * RECORD_BYTES)
        self.assertNotIn("damaged", self.again().stderr)

    def test_a_damaged_base_is_computed_again(self):
        self.state.unlink()
        flip(self.bases[0], 100000)
        self.bases[1].write_bytes(self.bases[1].read_bytes()[:-1])
        done = self.again()
        self.assertEqual(rows_of(done), self.rows)
        self.assertIn("its checksum does not match", done.stderr)
        self.assertIn("its size is wrong", done.stderr)
        self.state.unlink()
        self.assertNotIn("the f16 run is computed again", self.again().stderr)

    def test_a_base_of_another_chunk_is_not_believed(self):
        self.state.unlink()
        shutil.copyfile(self.bases[0], self.bases[1])
        done = self.again()
        self.assertEqual(rows_of(done), self.rows)
        self.assertIn("it belongs to another model, text or runtime", done.stderr)

    def test_states_that_do_not_suit_are_refused_and_kept(self):
        flipped = self.folder / "flipped"
        shutil.copyfile(self.state, flipped)
        flip(flipped, 20)
        version = self.folder / "version"
        shutil.copyfile(self.state, version)
        flip(version, 8)
        for path, more, words in [
            (
                self.state,
                ["-c", "72"],
                "to another command, context, batch, --from or number of needles",
            ),
            (
                self.state,
                ["-b", "32"],
                "to another command, context, batch, --from or number of needles",
            ),
            (
                self.state,
                ["--from", "16"],
                "to another command, context, batch, --from or number of needles",
            ),
            (flipped, [], "its header is damaged"),
            (version, [], "another version of kvant made it"),
            (TEXT, [], "this is not a file that --resume made"),
            (self.folder, [], ""),
        ]:
            with self.subTest(words=words, more=more):
                before = pathlib.Path(path).read_bytes() if path != self.folder else None
                done = run(*BASE, "--resume", path, "--chunks", "1", *more)
                self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""), done.stderr)
                self.assertIn("--resume", done.stderr)
                self.assertIn(words, done.stderr)
                if before is not None:
                    self.assertEqual(pathlib.Path(path).read_bytes(), before)

    def test_interrupted_and_going_on(self):
        self.state.unlink()
        env = dict(os.environ, KVANT_PLUGIN=PLUGIN)
        words = command(*BASE, "--chunks", "4", *CONFIGS, "--resume", self.state, "--json")
        for interruptions in range(3):
            child = subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
            )
            before = self.state.stat().st_size if self.state.exists() else 0
            while child.poll() is None and (
                not self.state.exists() or self.state.stat().st_size <= before + 300
            ):
                time.sleep(0.01)
            if interruptions < 2:
                child.send_signal(signal.SIGINT)
            out, err = child.communicate(timeout=100)
            self.assertEqual(child.returncode, INTERRUPTED if interruptions < 2 else OK, err)
            json.loads(out)
        self.assertEqual(json.loads(out), rows_of(run(*BASE, "--chunks", "4", *CONFIGS, "--json")))

    def test_two_at_a_time(self):
        with open(self.state) as held:
            import fcntl

            fcntl.flock(held, fcntl.LOCK_EX)
            done = self.again()
        self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""))
        self.assertIn("another kvant is using it", done.stderr)

    def test_full_disk(self):
        """A file system of 2 MiB has no room for bases, which is reported before any computation,
        and its space runs out while a state is written.
        """
        script = 'mount -t tmpfs -o size=2m none "$0" && shift 0 && exec "$@"'
        small = self.folder / "small"
        small.mkdir()
        probe = subprocess.run(
            ["unshare", "-rm", "sh", "-c", script, str(small), "true"], capture_output=True
        )
        if probe.returncode != 0:
            self.skipTest("this system lets nobody mount a small file system")
        words = command(*BASE, "--chunks", "4", "--stock", "q4_0")
        more = ["--chunks", "8", "--base-cache", str(small)]
        done = subprocess.run(
            ["unshare", "-rm", "sh", "-c", script, str(small), *words, *more],
            capture_output=True,
            text=True,
        )
        self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""))
        self.assertIn(
            f"need {8 * BASE_BYTES / 2**20:.0f} MiB, but only 2 MiB are free", done.stderr
        )
        # A block of 4096 bytes is left, one less than 8 records and the header.
        filler = f"head -c 2093000 /dev/zero > {small}/filler; "
        done = subprocess.run(
            [
                *"unshare -rm sh -c".split(),
                script.replace("&& exec", f"&& {filler} exec"),
                str(small),
                *words,
                "--resume",
                str(small / "state"),
            ],
            capture_output=True,
            text=True,
        )
        self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""), done.stderr)
        self.assertIn("No space left", done.stderr)
        self.assertIn("make room and give the same command again", done.stderr)


class Rows(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        other = tempfile.NamedTemporaryFile("w", suffix=".txt")
        other.write("A rose is a rose, said the gardener, and went on. " * 20)
        other.flush()
        cls.other = other
        cls.folder = temporary_folder(cls.addClassCleanup)
        cls.arguments = [
            *BASE,
            "-f",
            other.name,
            "--chunks",
            "2",
            *CONFIGS,
            "--resume",
            cls.folder / "state",
        ]
        cls.rows = rows_of(run(*cls.arguments, "--json"))

    @classmethod
    def tearDownClass(cls):
        cls.other.close()

    def test_a_row_a_text_and_one_of_all(self):
        names = [pathlib.Path(TEXT).name, pathlib.Path(self.other.name).name, "all"]
        self.assertEqual(
            [(row["text"], row["k"]) for row in self.rows],
            [(name, k) for name in names for k in ("f16", "turboquant-3", "q4_0")],
        )
        for a, b, both in zip(self.rows[:3], self.rows[3:6], self.rows[6:]):
            self.assertEqual(both["chunks"], a["chunks"] + b["chunks"])
            self.assertAlmostEqual(both["kld_mean"], (a["kld_mean"] + b["kld_mean"]) / 2, places=9)
            self.assertEqual(both["kld_max"], max(a["kld_max"], b["kld_max"]))

    def test_percentiles_ascend(self):
        for row in self.rows:
            self.assertEqual((row["from"], row["to"]), (32, 62))
            figures = [row[key] for key in ("kld_p50", "kld_p90", "kld_p99", "kld_p999", "kld_max")]
            self.assertEqual(figures, sorted(figures))

    def test_csv_has_the_same_numbers(self):
        done = run(*self.arguments, "--csv")
        table = list(csv.reader(io.StringIO(done.stdout)))
        self.assertEqual(table[0], list(self.rows[0]))
        for line, row in zip(table[1:], self.rows, strict=True):
            for text, value in zip(line, row.values(), strict=True):
                # JSON has 15 digits, CSV has as many as the number needs
                if isinstance(value, float):
                    self.assertAlmostEqual(
                        float(text) / (value or 1), value / (value or 1), places=13
                    )
                else:
                    self.assertEqual(text, "" if value is None else str(value))

    def test_positions_add_up(self):
        parts = rows_of(run(*self.arguments, "--by-position", "3", "--json"))
        self.assertEqual(len(parts), 3 * len(self.rows))
        for i, row in enumerate(self.rows):
            three = parts[3 * i : 3 * i + 3]
            self.assertEqual(
                [(part["from"], part["to"]) for part in three], [(32, 41), (42, 51), (52, 62)]
            )
            widths = [part["to"] - part["from"] + 1 for part in three]
            mean = sum(part["kld_mean"] * width for part, width in zip(three, widths)) / 31
            self.assertAlmostEqual(mean, row["kld_mean"], places=9)
            self.assertEqual(max(part["kld_max"] for part in three), row["kld_max"])

    def test_from_the_first_position_on(self):
        rows = rows_of(run(*BASE, "--chunks", "1", "--from", "0", "--stock", "q4_0", "--json"))
        self.assertEqual([(row["from"], row["to"]) for row in rows], [(0, 62)] * 2)

    def test_mistakes_are_named(self):
        for more, code, words in [
            (["-f", TEXT], USAGE, "is given twice"),
            (["--from", "63"], USAGE, "leaves nothing"),
            (["--by-position", "32"], USAGE, "more than the 31 positions"),
            (["-c", "16384"], RUNTIME, "longer than the model's limit of 8192"),
            (["--base-cache", "/nonexistent/folder"], RUNTIME, "--base-cache /nonexistent/folder"),
            (["--resume", "/nonexistent/state"], RUNTIME, "--resume /nonexistent/state"),
        ]:
            with self.subTest(more=more):
                done = run(*BASE, "--chunks", "1", *more)
                self.assertEqual((done.returncode, done.stdout), (code, ""), done.stderr)
                self.assertIn(words, done.stderr)

    def test_a_truncated_model(self):
        with tempfile.NamedTemporaryFile(suffix=".gguf") as broken:
            broken.write(pathlib.Path(SMALL).read_bytes()[:1000000])
            broken.flush()
            done = run("eval", "-m", broken.name, "-f", TEXT)
        self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""))
        self.assertIn("cannot load the model", done.stderr)


if __name__ == "__main__":
    unittest.main()
