#!/usr/bin/env python3
"""The shaders of bench/vulkan agree with the library, and a wrong shader is found.

test_shaders.py bench_vulkan glslangValidator FOLDER      FOLDER: of the compiled shaders
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

PROGRAM, COMPILER, SHADERS = sys.argv.pop(1), sys.argv.pop(1), sys.argv.pop(1)
SOURCE = pathlib.Path(__file__).resolve().parents[2] / "bench" / "vulkan"

# A mistake for each thing that the shaders must do right: comparison, file, text, wrong text.
# A driver may divide exactly although Vulkan does not ask for it, so no mistake is a division.
MISTAKES = [
    ("rows", "set_rows", "roundEven(scaled)", "floor(scaled + 0.5)"),
    ("rows", "set_rows", "== 0x80000000u ? 0u", "== 1u ? 0u"),
    ("rows", "set_rows", "atomicAnd(keys[word], ~mask);", ""),
    ("rows", "set_rows", "&& refused != 0u", "&& false"),
    (
        "rows",
        "set_rows",
        "const float scaled = shifted * inverse",
        "const float scaled = uintBitsToFloat(numbers[j]) * inverse - offset * inverse",
    ),
    ("rows", "exact", "(more || (kept & 1u) != 0u)", "(kept & 1u) != 0u"),
    ("rows", "exact", "(more || (kept & 1u) != 0u)", "more"),
    ("rows", "exact", "126u - exponent", "125u - exponent"),
    ("attention", "attention", "64u * block + token < push.n_tokens", "true"),
    ("attention", "attention", "k_zero * query_sum[g]", "k_zero * 0.99 * query_sum[g]"),
    ("attention", "attention", "p0 * v_zero[0] + p1 * v_zero[1]", "p0 * v_zero[0]"),
    ("attention", "attention", "total[g] * factor", "total[g]"),
    ("attention", "attention", "row % 2u == 0u ? x : x / 16.0", "x / 16.0"),
    ("attention", "combine", "exp2(parts[part] - most)", "1.0"),
]


def run(what, shaders):
    return subprocess.run([PROGRAM, shaders, what], capture_output=True, text=True)


class Shaders(unittest.TestCase):
    def test_they_agree_with_the_library(self):
        for what in ("rows", "attention"):
            done = run(what, SHADERS)
            print(done.stdout, end="")
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_a_mistake_is_found(self):
        for what, name, right, wrong in MISTAKES:
            with self.subTest(right), tempfile.TemporaryDirectory() as folder:
                for path in SOURCE.glob("*.*"):
                    shutil.copy(path, folder)
                path = next(pathlib.Path(folder).glob(f"{name}.[cg]*"))
                text = path.read_text()
                self.assertEqual(text.count(right), 1, f"{name}: {right}")
                path.write_text(text.replace(right, wrong))
                for shader in ("set_rows", "attention", "combine"):
                    command = [COMPILER, "-V", "--quiet", "--target-env", "vulkan1.2", "-o"]
                    files = [f"{folder}/{shader}.spv", f"{folder}/{shader}.comp"]
                    subprocess.run(command + files, check=True, stdout=subprocess.DEVNULL)
                done = run(what, folder)
                self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
                self.assertRegex(done.stdout, "DIFFERS|STORED|WRONG")


if __name__ == "__main__":
    unittest.main()
