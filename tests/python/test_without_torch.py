"""kvant without PyTorch and transformers: every name can be looked at, and using a name says what
to install.
"""

import inspect
import pydoc
import rlcompleter
import subprocess
import sys
import unittest
from importlib import metadata
from unittest import mock

from common import ROOT, TestCase

import kvant

NEED_TORCH = ("PagedCache", "calibrate", "evaluate", "tune")
version = metadata.version


def hidden(package):
    if package in ("torch", "transformers"):
        raise metadata.PackageNotFoundError(package)
    return version(package)


class WithoutTorch(TestCase):
    def setUp(self):
        for patch in (
            mock.patch.dict(sys.modules, torch=None, transformers=None),
            mock.patch.object(metadata, "version", hidden),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def test_names_can_be_looked_at(self):
        named = {}
        exec("from kvant import *", named)
        self.assertLessEqual(set(kvant.__all__), set(named))
        self.assertLessEqual(set(kvant.__all__), {name for name, _ in inspect.getmembers(kvant)})
        self.assertTrue("evaluate(" in pydoc.render_doc(kvant, renderer=pydoc.plaintext))
        completer = rlcompleter.Completer({"kvant": kvant})
        self.assertIn(
            "kvant.PagedCache", {completer.complete("kvant.P", i).rstrip("(") for i in range(2)}
        )

    def test_using_one_says_what_to_install(self):
        for name in NEED_TORCH:
            self.refused(
                ImportError,
                f"kvant.{name}|torch|pip install 'kvant[transformers]'",
                getattr(kvant, name),
            )
        for module, extra in (("torch", "torch"), ("transformers", "transformers")):
            self.refused(
                ImportError, f"pip install 'kvant[{extra}]'", __import__, f"kvant.{module}"
            )

    def test_other_errors_of_an_import_stay(self):
        with mock.patch.object(
            kvant, "import_module", side_effect=ModuleNotFoundError("numpy", name="numpy")
        ):
            self.refused(ModuleNotFoundError, "numpy", getattr, kvant, "Codec")


class Versions(TestCase):
    def test_of_the_package(self):
        self.assertRegex(kvant.__version__, r"^\d+\.\d+")
        with mock.patch.object(metadata, "version", side_effect=metadata.PackageNotFoundError):
            self.assertEqual(kvant.__version__, kvant.version())
        self.assertIn("__version__", dir(kvant))
        self.refused(AttributeError, "no attribute 'nothing'", lambda: kvant.nothing)

    def test_old_transformers_are_refused_by_name(self):
        """The message comes before anything of the module is imported."""
        program = (
            "import sys; from importlib import metadata; sys.modules['transformers'] = None\n"
            "metadata.version = lambda name: {'torch': '2.13.0', 'transformers': '4.57.6'}[name]\n"
            "import kvant.transformers"
        )
        path = str(ROOT / "integrations" / "python")
        run = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        last = run.stderr.strip().splitlines()[-1]
        for words in (
            "ImportError: kvant needs transformers 5.13.0 or newer",
            "4.57.6 is installed",
            "pip install -U 'kvant[",
        ):
            self.assertIn(words, last)


if __name__ == "__main__":
    unittest.main()
