"""kvant report with a model: the files after Ctrl-C, and resuming. test_report.py looks at the page
itself.
"""

import json
import os
import pathlib
import signal
import subprocess
import unittest

import settings
from testing import N_LAYERS, ON_SMALL, PLUGIN, SMALL, TEXT, command, run, temporary_folder

RUNTIME, INTERRUPTED = 1, 130


class Report(unittest.TestCase):
    def setUp(self):
        self.folder = temporary_folder(self.addCleanup)
        self.page = self.folder / "report.html"
        self.arguments = [
            "report",
            *ON_SMALL,
            "-o",
            self.page,
            *"--quick -c 64 --stock q4_0".split(),
        ]

    def until(self, step):
        """Interrupts as soon as the step has begun."""
        child = subprocess.Popen(
            command(*self.arguments, "--json"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(os.environ, KVANT_PLUGIN=PLUGIN),
        )
        for line in child.stderr:
            if line.startswith("{") and json.loads(line)["what"] == step:
                break
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=200)
        self.assertEqual(child.returncode, INTERRUPTED, err)
        without_plots = "  hint: this build has no plotting library"
        said = [line for line in err.splitlines() if not line.startswith(("{", without_plots))]
        self.assertEqual(
            said,
            [
                f"kvant: report: stopped; {self.page} is a partial page, "
                "and the same command continues from here"
            ],
        )
        return json.loads(out)

    def test_interrupted_and_going_on(self):
        first = self.until("speed")
        self.assertEqual(first, json.loads((self.folder / "report.json").read_text()))
        self.assertIs(first["complete"], False)
        states = {step["name"]: step["state"] for step in first["steps"]}
        self.assertEqual(
            (states["quality"], states["position"], states["speed"]),
            ("complete", "complete", "partial"),
        )
        (sizes,) = (step for step in first["steps"] if step["name"] == "sizes")
        self.assertEqual(
            [(row["k"], row["ctx"], row["filled"]) for row in sizes["rows"]],
            [(k, 8192, filled) for k in ("f16", "q4_0") for filled in (25, 50, 100)],
        )
        self.assertTrue(all(row["kv_bytes"] > 0 for row in sizes["rows"]))
        quality = first["steps"][0]
        self.assertEqual([row["k"] for row in quality["rows"]], ["f16", "q4_0"])
        self.assertTrue(
            quality["command"].startswith(f"kvant eval -m {pathlib.Path(SMALL).name} --json"),
            quality["command"],
        )
        self.assertEqual(first["about"]["n_ctx_train"], 8192)
        self.assertIn('"kvant_report":1', self.page.read_text())
        second = self.until("speed")
        self.assertEqual(second["steps"][:2], first["steps"][:2])
        # Another command line measures again. A second text is not mixed with the first.
        layers = self.folder / "layers.json"
        layers.write_text('[{"layer": 0, "calibration": "/home/somebody/model.kvcal"}]')
        own = self.folder / "own.kvant"
        own.write_text(settings.plain(N_LAYERS, "3x64", "int-8", "int-8"))
        self.arguments += [
            "--chunks",
            "2",
            "--sensitivity",
            layers,
            "--config",
            own,
            "--fp32",
            "--stock",
            "q8_0",
        ]
        third = self.until("speed")  # a resumed step may end before it prints anything
        self.assertEqual(third["steps"][0]["rows"][0]["chunks"], 2)
        # Settings files come after the remaining caches, with their options.
        self.assertTrue(
            third["steps"][0]["command"].endswith(
                "--stock q4_0 --stock q8_0 --config own.kvant --fp32"
            )
        )
        rows = {step["name"]: step["rows"] for step in third["steps"]}
        self.assertEqual(
            rows["sensitivity"][0]["calibration"], "model.kvcal", "a report says nothing of folders"
        )
        other = self.folder / "other.txt"
        other.write_text("Another text. " * 100)
        before = (self.folder / "report.json").read_text()
        done = run(*self.arguments, "-f", other, code=RUNTIME)
        self.assertIn("has results of another text_fingerprint", done.stderr)
        self.assertEqual((self.folder / "report.json").read_text(), before)

    def settings_of_another_model(self):
        path = self.folder / "other.kvant"
        path.write_text(settings.plain(2, "1x64", "int-8", "int-8"))
        return path

    def test_mistakes_are_named(self):
        short, truncated = self.folder / "short.txt", self.folder / "truncated.gguf"
        short.write_text("A text of a few words.")
        with open(SMALL, "rb") as model:
            truncated.write_bytes(model.read(1 << 20))
        for more, words in [
            (["-c", "16384"], "longer than the model's limit of 8192"),
            (["-c", "64", "-f", short], "contexts of 64 need at least 128"),
            (["-f", "/nonexistent"], "/nonexistent"),
            (["--config", self.settings_of_another_model()], "is for another model"),
            (["-m", truncated], "cannot load the model"),
            (["--sensitivity", TEXT], "is not a JSON array of objects"),
            (["-o", "/nonexistent/page.html"], "/nonexistent"),
        ]:
            with self.subTest(more=more):
                done = run(*self.arguments, *more)
                self.assertEqual((done.returncode, done.stdout), (RUNTIME, ""), done.stderr)
                self.assertIn(words, done.stderr)
        (self.folder / "report.json").write_text("{}")
        done = run(*self.arguments, code=RUNTIME)
        self.assertIn("is not a result of kvant report", done.stderr)
        self.assertEqual((self.folder / "report.json").read_text(), "{}")


if __name__ == "__main__":
    unittest.main()
