"""What kvant's plug-in for vLLM refuses at the start, without an engine: releases that were not
tested. test_vllm.py has models and options that an engine refuses.
"""

import pathlib
import sys
import types
import unittest
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "pytorch")]

import vllm  # noqa: E402
from common import TestCase  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

import kvant  # noqa: E402
from kvant.vllm import versions  # noqa: E402


class Versions(TestCase):
    def test_releases(self):
        for version in ("0.32.0", "0.33.0", "0.33.1.dev7+g1234567"):
            self.assertIsNone(versions.refusal(version))
        for version in ("0.29.0", "0.34.0", "1.0", "0.3.3", "dev"):
            self.assertIn(f"vLLM {version} was not tested", versions.refusal(version))
        self.assertIsNone(versions.refusal(vllm.__version__))

    def test_another_release_is_refused_for_users_of_kvant(self):
        """Without kvant's settings the release works as if kvant were not installed."""
        with mock.patch.object(vllm, "__version__", "0.99.1"):
            with (
                mock.patch.dict("os.environ", KVANT_VLLM="turboquant4"),
                self.assertRaisesRegex(RuntimeError, "kvant: vLLM 0.99.1 was not tested, only 0.3"),
            ):
                kvant.vllm.register()
            with mock.patch.dict("os.environ", KVANT_VLLM=""):
                registry = f"{AttentionBackendEnum.__module__}.register_backend"
                with mock.patch(registry) as changed:
                    kvant.vllm.register()
                changed.assert_not_called()
            with self.assertRaisesRegex(RuntimeError, "0.99.1 was not tested"):
                versions.Backend
        with self.assertRaises(AttributeError):
            versions.Backend

    def test_the_name_of_the_backend_stays_known(self):
        names = {}
        registry = types.SimpleNamespace(register=names.setdefault)
        with mock.patch(f"{AttentionBackendEnum.__module__}.AttentionBackendEnum", registry):
            kvant.vllm._register_refusal()
        self.assertEqual(names, {"KVANT": "kvant.vllm.versions.Backend"})

    def test_every_release_was_run(self):
        text = (HERE.parents[2] / "bench" / "results" / "vllm_versions.csv").read_text()
        found = {".".join(line.split(",")[1].split(".")[:2]) for line in text.splitlines()[1:]}
        self.assertEqual(found, set(versions.TESTED))


if __name__ == "__main__":
    unittest.main()
