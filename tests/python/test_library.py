"""How the package finds libkvant, what an import loads, and the package's errors."""

import ctypes
import os
import pickle
import subprocess
import sys
import unittest

from common import ROOT, TestCase

import kvant
from kvant import checks, library, structs

PACKAGE = ROOT / "integrations" / "python"
OTHER = "kernel32.dll" if sys.platform == "win32" else "libm.so.6"  # a library that is not kvant


def run(program, **environment):
    """Runs a program in a new Python; returns its output, or the last line of its error."""
    env = os.environ | {"PYTHONPATH": str(PACKAGE)} | environment
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
import kvant
"""


NEED_TORCH = (
    "PagedCache",
    "Evaluation",
    "calibrate",
    "evaluate",
    "tune",
)  # test_paged, pytorch/test_models


class Imports(TestCase):
    def test_importing_loads_nothing(self):
        program = (
            "import kvant, sys; "
            "print([m for m in sys.modules if m.split('.')[0] in ('numpy', 'torch', 'ctypes')])"
        )
        self.assertEqual(run(program, KVANT_LIBRARY="/nowhere"), "[]")

    def test_every_name_is_there(self):
        for name in kvant.__all__:
            if name not in NEED_TORCH:
                self.assertIsNotNone(getattr(kvant, name))
        self.assertIn("Cache", dir(kvant))
        self.refused(AttributeError, "'Caches'", getattr, kvant, "Caches")

    def test_numpy_is_needed_where_arrays_are(self):
        shape = "n_layers=2, n_kv_heads=1, head_dim=64"
        for line in (
            "kvant.Codec('int-4', 64).true_bits",
            f"kvant.Scheme({shape}).context_bytes(64)",
            "kvant.codecs()",
        ):
            self.assertTrue(run(f"{WITHOUT_NUMPY}print(bool({line}))") == "True", line)
        for line in ("kvant.Cache", "kvant.Codec('int-4', 64).encode([])"):
            self.assertIn("pip install numpy", run(WITHOUT_NUMPY + line))


class Finding(TestCase):
    def test_version_and_levels(self):
        self.assertRegex(kvant.version(), r"^\d+\.\d+\.\d+$")
        level = kvant.cpu_level()
        self.addCleanup(kvant.set_cpu_level, level)
        kvant.set_cpu_level("c")
        self.assertEqual(kvant.cpu_level(), "c")
        self.refused(ValueError, "'mmx'", kvant.set_cpu_level, "mmx")
        self.assertEqual(run("import kvant; print(kvant.cpu_level())", KVANT_CPU="c"), "c")
        self.assertIn("'mmx'", run("import kvant; kvant.codecs()", KVANT_CPU="mmx"))

    def test_a_library_that_is_not_there(self):
        program = "import kvant; kvant.codecs()"
        self.assertIn("KVANT_LIBRARY", run(program, KVANT_LIBRARY="/nowhere/libkvant.so"))
        self.assertIn("another release", run(program, KVANT_LIBRARY=OTHER))

    def test_where_it_is_looked_for(self):
        """Only KVANT_LIBRARY, or the library next to the package before the loader's path."""
        names = library._names()
        self.assertEqual(names, [os.environ["KVANT_LIBRARY"]])
        program = (
            "import kvant.library as l; n = len(l.NAMES); "
            "print(l._names()[-1], all(map(l.os.path.isfile, l._names()[:-n])))"
        )
        self.assertEqual(run(program, KVANT_LIBRARY=""), f"{library.NAMES[-1]} True")

    def test_a_gpu_library_that_is_not_there(self):
        program = "import kvant; kvant.Cache(1, 1, 1, 64, 64, device='cuda', k='int-4')"
        self.assertIn(
            "/nowhere/libkvant_cuda.so",
            run(program, KVANT_CUDA_LIBRARY="/nowhere/libkvant_cuda.so"),
        )


class Threads(TestCase):
    @unittest.skipUnless(hasattr(os, "sched_setaffinity"), "no processors can be chosen here")
    def test_the_default_is_what_the_library_counts(self):
        # The library also knows the limits of control groups.
        allowed = os.sched_getaffinity(0)
        self.assertEqual(checks.threads(None), library.library().kvant_available_cpus())
        self.assertLessEqual(checks.threads(None), len(allowed))
        os.sched_setaffinity(0, {min(allowed)})
        try:
            self.assertEqual(checks.threads(None), 1)
        finally:
            os.sched_setaffinity(0, allowed)
        self.assertEqual(checks.threads(8), 8)


class Errors(TestCase):
    def test_words_and_status(self):
        error = self.refused(
            kvant.Error, "codec 'int-99': int takes 2 to 8 bits", kvant.Codec, "int-99", 64
        )
        self.assertEqual((error.status, error.reason), (20, "int takes 2 to 8 bits, as in int-4"))
        again = pickle.loads(pickle.dumps(error))
        self.assertEqual(
            (str(again), again.status, again.reason), (str(error), error.status, error.reason)
        )

    def test_older_messages_are_not_repeated(self):
        """A status that needs no message has its own words."""
        self.refused(kvant.Error, "int-99", kvant.Codec, "int-99", 64)
        with self.assertRaises(kvant.Error) as raised:
            library.check("rows", 50)
        self.assertEqual(str(raised.exception), "rows: input holds a NaN or an infinity")

    def test_invoke_knows_where_reasons_are(self):
        """In an argument of the call, in kvant_error_message(), or nowhere."""
        scheme = structs.SchemeParams.new(k=b"nope")
        family = structs.CodecFamily.new()
        for name, arguments, reason in (
            ("kvant_codec_check", (b"int-99", 0, None), "int takes 2 to 8 bits, as in int-4"),
            ("kvant_scheme_create", (scheme, ctypes.c_void_p()), "nope: there is no codec 'nope'"),
            ("kvant_codec_family_get", (1 << 20, family), "invalid argument"),
        ):
            with self.subTest(name=name), self.assertRaises(kvant.Error) as raised:
                library.invoke("it", name, *arguments)
            self.assertEqual(str(raised.exception).partition(";")[0], f"it: {reason}")


if __name__ == "__main__":
    unittest.main()
