"""Calibrations that the plug-in finds next to a model, and matrices that it learns on a GPU, tested
with a llama.cpp program (learn_probe.c). Every case has its own folder.
"""

import os
import pathlib
import struct
import subprocess
import tempfile
import unittest

PROBE = os.environ["LEARN_PROBE"]
SMALL, CALIBRATION = (
    pathlib.Path(os.environ[name]) for name in ("KVANT_SMALL_MODEL", "KVANT_SMALL_KVCAL")
)
TEXT = os.environ["KVANT_TEXT"]
LEARNS = "; not calibrated, learns from prompts\n"
# A cache that fits as f16 stays f16 and has no matrix. So these cases use a cache that does not
# fit.
GPU = {
    "KVANT_EXACT": "0",
    "KVANT_TEST_MOCK": os.environ["LEARN_STANDIN"],
    "KVANT_CUDA_LIBRARY": os.environ["LEARN_CUDA"],
    "LD_LIBRARY_PATH": os.environ["LEARN_DRIVER"],
}


def difference(a, b):
    """Root mean square of the difference, relative to b."""
    return (sum((x - y) ** 2 for x, y in zip(a, b)) / sum(y * y for y in b)) ** 0.5


class Probe(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.home = pathlib.Path(folder.name).resolve()

    def run_probe(self, *arguments, **variables):
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("KVANT", "GGML", "LLAMA"))
        }
        env.update({name: str(value) for name, value in variables.items()})
        done = subprocess.run(
            [PROBE, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=300
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stderr

    def model(self, calibration=None, end=b""):
        """Returns a copy of the small model, next to a file with these bytes. The bytes in `end`
        make it another file.
        """
        path = self.home / "model.gguf"
        path.write_bytes(SMALL.read_bytes() + end)
        if calibration is not None:
            path.with_suffix(".kvcal").write_bytes(calibration)
        return path

    def first_keys(self, tokens, context, on_gpu, text=TEXT, alone=0, **variables):
        """The first layer's key rows in the cache after a prompt, of which the last tokens come
        alone.
        """
        path = self.home / "state"
        self.run_probe(
            SMALL,
            tokens,
            text,
            LEARN_PROBE_STATE=path,
            LEARN_PROBE_CTX=context,
            LEARN_PROBE_ALONE=alone,
            KVANT_V="trellis-4",
            KVANT_K="trellis-4:transform=first,sink=0",
            **{**(GPU if on_gpu else {}), **variables},
        )
        data, width, layers = path.read_bytes(), 3 * 64, 4
        bytes_each = 2 * tokens * width
        # Each tensor has its type and the bytes of a row before its rows.
        at = len(data) - 2 * layers * bytes_each - (2 * layers - 1) * 12
        numbers = struct.unpack_from(f"<{tokens * width}e", data, at)
        return [numbers[i : i + width] for i in range(0, len(numbers), width)]

    def check_beside_cpu(self, tokens, alone, *text, **variables):
        """The CPU seals each batch with its own matrix, a GPU seals later. If every row had the
        codes of another token, 4 bits would differ by more than 1.
        """
        cpu, gpu = (
            self.first_keys(
                tokens + alone, 8192, on_gpu, *text, alone=alone, **(variables if on_gpu else {})
            )
            for on_gpu in (False, True)
        )
        self.assertLess(max(difference(*rows) for rows in zip(gpu, cpu)), 0.3)
        return gpu


class Learning(Probe):
    def test_a_calibration_beside_the_model(self):
        model = self.model(CALIBRATION.read_bytes())
        line = f"; calibrated: {model.with_suffix('.kvcal')}\n"
        self.assertIn(line, self.run_probe(model, 100, 1))
        self.assertIn(line, self.run_probe(model, 100, 1, KVANT_PRESET="small"))
        self.assertIn(LEARNS, self.run_probe(model, 100, 1, "none"))  # the model is not mapped

    def test_no_calibration(self):
        self.assertIn(LEARNS, self.run_probe(self.model(), 100, 1))

    def test_what_was_named_stays(self):
        model = self.model(CALIBRATION.read_bytes())
        self.assertNotIn("calibrated", self.run_probe(model, 100, 1, KVANT_K="int-8"))
        self.assertIn(
            "; calibrated\n", self.run_probe(model, 100, 1, KVANT_CALIBRATION=CALIBRATION)
        )

    def test_files_that_are_not_used(self):
        good = CALIBRATION.read_bytes()
        for calibration, end, why in (
            (good[: len(good) // 2], b"", ""),
            (good, bytes(32), "it was made with another file than model.gguf\n"),
        ):
            model = self.model(calibration, end)
            said = self.run_probe(model, 100, 1)
            self.assertIn(f"kvant: {model.with_suffix('.kvcal')} is not used: {why}", said)
            self.assertIn(LEARNS, said)

    def test_first_rows_are_near_on_a_gpu(self):
        """The first layer's keys and queries are the same on both devices. A GPU's rows were fp16
        before, which moves a number by up to 2^-12 of itself, and sums have another order. So an
        element of W between two of its 4-bit values may become the other one. Then all codes of a
        head are chosen anew. Two codes of a number differ by the errors of both: at 4 bits each is
        0.072 of a row, so together they are 0.10. The last token needs a page, for which the first
        512 rows are sealed.
        """
        cpu, gpu = (self.first_keys(577, 1024, on_gpu, alone=1)[:512] for on_gpu in (False, True))
        differences = sorted(difference(*rows) for rows in zip(gpu, cpu))
        self.assertLess(differences[-1], 0.3)
        self.assertLess(differences[256], 0.1)
        self.assertGreater(differences[0], 0)

    def test_keys_that_nothing_is_learnt_from_are_kept(self):
        """In this prompt of three batches, the second is monotonous and the third is short."""
        text = self.home / "text"
        first = pathlib.Path(TEXT).read_bytes()[:2000]
        text.write_bytes(first + 700 * b" the" + 400 * b" and so on")
        self.check_beside_cpu(1050, 0, text)

    def test_prompts_longer_than_the_pages(self):
        self.check_beside_cpu(1300, 40)

    def test_without_memory_for_queries_keys_make_the_matrix(self):
        self.check_beside_cpu(700, 0, KVANT_TEST_FREE_BYTES="1000000")

    def test_tokens_that_come_alone_leave_a_prompt_as_it_is(self):
        """All rows have pages, and no row has to be sealed."""
        prompt = self.first_keys(400, 8192, True)
        self.assertEqual(self.check_beside_cpu(400, 33)[:400], prompt)


class LearningLonger(Probe):
    """The same with more tokens, among the long tests."""

    def test_tokens_that_come_alone_after_a_prompt(self):
        self.check_beside_cpu(400, 250)

    def test_two_thousand_tokens(self):
        self.check_beside_cpu(2100, 0)


if __name__ == "__main__":
    unittest.main()
