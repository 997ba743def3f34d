"""The flags that kvant exec prints where llama.cpp lists a GPU of Vulkan, typed as printed.

KVANT_VULKAN is a folder of llama.cpp's programs and libraries with Vulkan. Mesa's lavapipe is a GPU
for that, with GGML_VK_VISIBLE_DEVICES=0.
"""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import unittest

from testing import MODEL, run

RUNTIME = os.environ.get("KVANT_VULKAN", "")
VARIABLES = {
    name: value for name, value in os.environ.items() if name.startswith("GGML_VK")
}  # run() passes none of GGML's
OK = 0


def listed():
    if not RUNTIME:
        return []
    done = subprocess.run(
        [f"{RUNTIME}/llama-bench", "--list-devices"], capture_output=True, text=True
    )
    return re.findall(r"^  (Vulkan\d+):", done.stdout, re.MULTILINE)


@unittest.skipUnless(listed(), "needs a llama.cpp that lists Vulkan0: KVANT_VULKAN")
class Vulkan(unittest.TestCase):
    def exec(self, program, *words):
        done = run("exec", "--", f"{RUNTIME}/{program}", *words, timeout=1500, **VARIABLES)
        self.assertEqual(done.returncode, OK, done.stderr)
        return done

    def printed(self, program, *words):
        """The flags of the hint."""
        said = self.exec(program, *words).stderr
        self.assertIn("weights stay on the CPU", said)
        return shlex.split(re.search(r"hint: .*: (--device KVANT.*)$", said, re.MULTILINE).group(1))

    def sizes(self, text, what):
        return {
            name: float(size)
            for name, size in re.findall(rf"(\S+) +{what} buffer size = +([\d.]+) MiB", text)
        }

    def test_weights_on_the_gpu_and_every_layers_cache(self):
        with tempfile.TemporaryDirectory() as folder:
            tiny = pathlib.Path(__file__).parent.parent / "integration" / "tiny_models.py"
            subprocess.run([sys.executable, "-B", tiny, folder], check=True)
            for name in ("llama", "gemma3", "llama80"):
                base = ["-m", f"{folder}/{name}.gguf", "-p", "8", "-n", "4", "-r", "1", "-v"]
                placed = []
                for given in ([], ["-ngl", "3"]):
                    flags = self.printed("llama-bench", *base, *given)
                    said = self.exec("llama-bench", *base, *flags).stderr
                    self.assertNotIn("weights stay", said)
                    self.assertIn(" 4 of 4 layers", said)
                    self.assertEqual(set(self.sizes(said, "KV")), {"KVANT"})
                    placed.append(self.sizes(said, "model")["Vulkan0"])
                output = 0.25  # MiB; 3 of -ngl are the output and two of four layers
                self.assertAlmostEqual(placed[0] - output, 2 * (placed[1] - output), delta=0.05)
                self.assertGreater(
                    placed[0], 0.9 * (pathlib.Path(folder) / f"{name}.gguf").stat().st_size / 2**20
                )

    @unittest.skipUnless(MODEL, "needs a model")
    def test_the_model_answers(self):
        """lavapipe compiles shaders for half a minute."""
        base = [
            "-m",
            MODEL,
            "-no-cnv",
            "-p",
            "The capital of France is",
            "-n",
            "2",
            "--temp",
            "0",
            "-c",
            "256",
            "-v",
        ]
        flags = self.printed("llama-completion", *base)
        done = self.exec("llama-completion", *base, *flags)
        self.assertIn(" Paris", done.stdout)
        self.assertIn(" 30 of 30 layers", done.stderr)
        self.assertGreater(self.sizes(done.stderr, "model")["Vulkan0"], 90)


if __name__ == "__main__":
    unittest.main()
