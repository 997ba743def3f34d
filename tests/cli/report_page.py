"""The page of kvant report for the tests: results, and the page that they make in a browser."""

import copy
import json
import pathlib
import unittest

from browser import Browser
from testing import run, temporary_folder


OK, RUNTIME, USAGE = 0, 1, 2
HERE = pathlib.Path(__file__).resolve().parent
RESULTS = json.loads((HERE / "report_results.json").read_text())


def step(results, name):
    return next(step for step in results["steps"] if step["name"] == name)


def presets():
    """Results with two presets in place of the codecs: sizes of 4.25 and 3.25 bits and 1 MiB that
    stays fp16, and speeds with their spread.
    """
    results = copy.deepcopy(RESULTS)
    names = {
        "int-4:axis=channel,group=64": ("balanced", 4.25, 0.0202),
        "turboquant-3": ("small", 3.25, 0.08),
    }
    for each in results["steps"]:
        for row in each["rows"]:
            row["preset"], bits, kld = names.get(row["k"], (None, None, None))
            if row["preset"] and each["name"] == "quality":
                row.update(bits=bits, kv_bytes=11796480 * bits / 16 + (1 << 20), kld_mean=kld)
    for row in step(results, "speed")["rows"]:
        low, high = {"balanced": (19.0, 21.0), "small": (9.0, 30.0)}.get(row["preset"], (9.5, 10.5))
        row.update(rounds=3, decode_low=low, decode_high=high, decode_tps=(low + high) / 2)
    return results


class Folder(unittest.TestCase):
    def setUp(self):
        self.folder = temporary_folder(self.addCleanup)
        self.page = self.folder / "page.html"

    def make(self, results):
        source = self.folder / "results.json"
        source.write_text(results if isinstance(results, str) else json.dumps(results))
        return run("report", "--from", source, "-o", self.page)


class Page(Folder):
    """A page in a browser. A class of tests skips itself without a browser."""

    @classmethod
    def setUpClass(cls):
        cls.browser = Browser()

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()

    def setUp(self):
        super().setUp()
        self.browser.requests.clear()
        self.browser.complaints.clear()

    def open(self, results=RESULTS, **look):
        self.assertEqual(self.make(results).returncode, OK)
        self.browser.look(**look)
        self.browser.open(self.page)

    def evaluate(self, expression):
        return self.browser.evaluate(expression)
