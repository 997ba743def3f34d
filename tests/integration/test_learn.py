"""What the plug-in finds beside a model, and what it learns on a GPU, by a llama.cpp program (learn_probe.c). Every case has a
folder of its own."""

import os
import pathlib
import struct
import subprocess
import tempfile
import unittest

PROBE = os.environ["LEARN_PROBE"]
SMALL, CALIBRATION = (pathlib.Path(os.environ[name]) for name in ("KVANT_SMALL_MODEL", "KVANT_SMALL_KVCAL"))
TEXT = os.environ["KVANT_TEXT"]
LEARNS = "; not calibrated, learns from prompts\n"
# A cache that fits as f16 is f16 and has no matrix. The cases are about one that does not fit.
GPU = {
    "KVANT_EXACT": "0",
    "KVANT_TEST_STANDIN": os.environ["LEARN_STANDIN"],
    "KVANT_CUDA_LIBRARY": os.environ["LEARN_CUDA"],
    "LD_LIBRARY_PATH": os.environ["LEARN_DRIVER"],
}


def difference(a, b):
    """Relative, root mean square."""
    return (sum((x - y) ** 2 for x, y in zip(a, b)) / sum(y * y for y in b)) ** 0.5


class Probe(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.home = pathlib.Path(folder.name).resolve()

    def run_probe(self, *arguments, **variables):
        env = {name: value for name, value in os.environ.items() if not name.startswith(("KVANT", "GGML", "LLAMA"))}
        env.update({name: str(value) for name, value in variables.items()})
        done = subprocess.run([PROBE, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stderr

    def model(self, calibration=None, end=b""):
        """A copy of the small model, beside it a file with these bytes. end: bytes that make it another file."""
        path = self.home / "model.gguf"
        path.write_bytes(SMALL.read_bytes() + end)
        if calibration is not None:
            path.with_suffix(".kvcal").write_bytes(calibration)
        return path

    def first_keys(self, tokens, context, on_gpu, text=TEXT, alone=0, **variables):
        """Rows that a cache has of the first layer's keys after a prompt, of which the last tokens
        come alone."""
        path = self.home / "state"
        self.run_probe(SMALL, tokens, text, LEARN_PROBE_STATE=path, LEARN_PROBE_CTX=context,
                       LEARN_PROBE_ALONE=alone,
                       KVANT_V="trellis-4", KVANT_K="trellis-4:transform=first,sink=0",
                       **{**(GPU if on_gpu else {}), **variables})
        data, width, layers = path.read_bytes(), 3 * 64, 4
        bytes_each = 2 * tokens * width
        # Each tensor has its type and a row's bytes in front.
        at = len(data) - 2 * layers * bytes_each - (2 * layers - 1) * 12
        numbers = struct.unpack_from(f"<{tokens * width}e", data, at)
        return [numbers[i : i + width] for i in range(0, len(numbers), width)]

    def check_prompt(self, keys, prompt, n):
        """n rows of a prompt are as they were before other tokens came. Its last block is open for
        these, so its rows may be fp16 now: then they are nearer to llama.cpp's own."""
        sealed = n - n % 64
        self.assertEqual(keys[:sealed], prompt[:sealed])
        if keys[sealed:n] != prompt[sealed:n]:
            exact = self.first_keys(n, 8192, True, KVANT_EXACT="auto")
            for row in range(sealed, n):
                self.assertLess(difference(keys[row], exact[row]),
                                difference(prompt[row], exact[row]))

    def check_rows_behind(self, tokens, alone):
        """The same rows, whether they wait or not. A search may end elsewhere for tokens that come
        alone meanwhile."""
        roomy, cramped = (self.first_keys(tokens + alone, 8192, True, alone=alone, **variables)
                          for variables in ({}, {"KVANT_TEST_FREE_BYTES": "1000000"}))
        self.check_prompt(roomy, cramped, tokens)
        for rows in zip(roomy[tokens:], cramped[tokens:]):
            self.assertLess(difference(*rows), 0.3)

    def check_tokens_alone(self, numbers):
        """They change nothing of the prompt's rows; theirs take the prompt's matrix, whether the
        wait is over by then or not. (The CPU stores a prompt's rows before it sees more.)"""
        prompt = self.first_keys(400, 8192, True)
        for alone in numbers:
            cpu, gpu = (self.first_keys(400 + alone, 8192, on_gpu, alone=alone)
                        for on_gpu in (False, True))
            self.check_prompt(gpu, prompt, 400)
            self.assertLess(max(difference(*rows) for rows in zip(gpu, cpu)), 0.3)


class Learning(Probe):
    def test_a_calibration_beside_the_model(self):
        model = self.model(CALIBRATION.read_bytes())
        line = f"; calibrated: {model.with_suffix('.kvcal')}\n"
        self.assertIn(line, self.run_probe(model, 100, 1))
        self.assertIn(line, self.run_probe(model, 100, 1, KVANT_PRESET="small"))
        self.assertIn(LEARNS, self.run_probe(model, 100, 1, "none"))  # it is not mapped

    def test_no_calibration(self):
        self.assertIn(LEARNS, self.run_probe(self.model(), 100, 1))

    def test_what_was_named_stays(self):
        model = self.model(CALIBRATION.read_bytes())
        self.assertNotIn("calibrated", self.run_probe(model, 100, 1, KVANT_K="int-8"))
        self.assertIn("; calibrated\n", self.run_probe(model, 100, 1, KVANT_CALIBRATION=CALIBRATION))

    def test_files_that_are_not_used(self):
        good = CALIBRATION.read_bytes()
        for calibration, end, why in ((good[: len(good) // 2], b"", ""), (good, bytes(32), "it was made with another file than model.gguf\n")):
            model = self.model(calibration, end)
            said = self.run_probe(model, 100, 1)
            self.assertIn(f"kvant: {model.with_suffix('.kvcal')} is not used: {why}", said)
            self.assertIn(LEARNS, said)

    def test_matrices_of_first_rows_are_the_same_on_a_gpu(self):
        """The first layer's keys and queries are the same on both devices, so are centres, matrix and codes: decoding rounds in another
        order. ggml may round keys otherwise (with AVX-512): a search then ends elsewhere for one row in fifty, with another matrix
        for all. A GPU's first version is for [0, 3072), a CPU's for [0, 1024)."""
        for tokens, context in ((400, 512), (1000, 8192)):
            cpu, gpu = (self.first_keys(tokens, context, on_gpu) for on_gpu in (False, True))
            differences = [difference(*rows) for rows in zip(gpu, cpu)]
            self.assertLess(max(differences), 0.3)
            if context == 512:
                self.assertLess(sum(x > 1e-3 for x in differences), tokens / 20)

    def test_keys_that_nothing_is_learnt_from_wait_with_the_others(self):
        """Of three batches the second one is monotonous, and the third one is short."""
        text = self.home / "text"
        first = pathlib.Path(TEXT).read_bytes()[:2000]
        text.write_bytes(first + 700 * b" the" + 400 * b" and so on")
        cpu, gpu = (self.first_keys(1050, 8192, on_gpu, text) for on_gpu in (False, True))
        self.assertLess(max(difference(*rows) for rows in zip(gpu, cpu)), 0.3)

    def test_rows_behind_those_that_are_learnt_from_wait_where_memory_allows(self):
        self.check_rows_behind(1300, 40)

    def test_tokens_decoded_while_keys_wait_are_kept(self):
        self.check_tokens_alone((5, 33))


class LearningLonger(Probe):
    """The same with more tokens, among the long tests."""

    def test_rows_behind_those_that_are_learnt_from_wait_where_memory_allows(self):
        self.check_rows_behind(2100, 0)

    def test_tokens_decoded_while_keys_wait_are_kept(self):
        self.check_tokens_alone((32, 90))


if __name__ == "__main__":
    unittest.main()
