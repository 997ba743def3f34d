"""run.py FOLDER [EMULATOR...]: runs what prepare.sh has put into the folder, on the machine that it
was made for, or under an emulator such as `wine`.

1. The unit tests.
2. The bytes that codecs write, at every CPU level of the machine.
3. `kvant selftest`.
4. `kvant run` with the real libraries of llama.cpp that npm distributes: a cache of int-8 and the
   preset balanced give the text that llama.cpp's own cache gives.
5. On Windows, tests/windows instead of 4. It does the same, and more.

KVANT_PARTS names the parts to run: unit bytes selftest command."""

import concurrent.futures
import os
import pathlib
import platform
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECONDS = 1200
NO_SUCH_LEVEL = 2
LEVELS = {
    "x86_64": "c avx2 avx2vnni avx512 avx512vnni avx512vbmi".split(),
    "aarch64": "c neon neondot".split(),
}
# SmolLM2 copies a pattern here, so the errors of 4 bits do not change a token.
PROMPT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"


class Native:
    def __init__(self, folder, emulator):
        self.folder = folder
        self.emulator = emulator
        self.machine = (folder / "machine").read_text().strip()
        self.windows = self.machine.startswith("windows")
        self.programs = sorted((folder / "programs").iterdir())
        self.kvant = next((folder / "dist" / "bin").glob("kvant*"))
        self.failed = 0

    def run(self, program, *words):
        """Exit status and output. Tests name files of the source relative to its root."""
        done = subprocess.run(
            [*self.emulator, program, *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=SECONDS,
        )
        texts = [out.decode(errors="replace") for out in (done.stdout, done.stderr)]
        return done.returncode, *(text.replace("\r", "") for text in texts)

    def say(self, what, right, text):
        if right:
            print(f"{what}: {text}", flush=True)
            return
        self.failed += 1
        print(f"{what}: failed\n{text}", flush=True)

    def unit_test(self, program):
        """Wine ends with 0 after a crash, so the line that cmocka prints at the end counts."""
        try:
            status, printed, said = self.run(program)
        except subprocess.TimeoutExpired:
            return program.stem, False, f"not ready after {SECONDS} s"
        lines = (printed + said).splitlines()
        passed = [line for line in lines if "PASSED" in line]
        right = status == 0 and passed and not any("FAILED" in line for line in lines)
        return program.stem, right, passed[-1] if right else "\n".join(lines[-20:])

    def unit(self):
        tests = [program for program in self.programs if program.stem.startswith("test_")]
        assert len(tests) > 40, tests
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for result in pool.map(self.unit_test, tests):
                self.say(*result)

    def bytes(self):
        expected = (ROOT / "tests" / "unit" / "same_bytes.txt").read_text().splitlines()
        program = next(program for program in self.programs if program.stem == "same_bytes")
        compared = 0
        for level in LEVELS[self.machine.split("-")[-1]]:
            status, printed, said = self.run(program, level)
            if status == NO_SUCH_LEVEL:
                print(f"not run: CPU level {level}, which this machine lacks", flush=True)
                continue
            compared += 1
            right = status == 0 and printed.splitlines() == expected
            text = f"same bytes ({len(expected)} hashes)"
            self.say(f"level {level}", right, text if right else said or "different bytes")
        self.say("levels", compared >= 2, f"{compared} compared")

    def selftest(self):
        status, printed, said = self.run(self.kvant, "selftest", "-c", "int-4")
        self.say("kvant selftest", status == 0, (printed + said).strip())

    def generate(self, *cache):
        words = ("--runtime", self.folder / "runtime", "-m", self.folder / "model.gguf")
        words += ("--raw", "-t", "2", "-n", "4", "-p", PROMPT)
        return self.run(self.kvant, "run", *words, *cache)

    def command(self):
        if self.windows:
            variables = {
                "KVANT_DIST": "dist",
                "KVANT_RUNTIME_DLLS": "runtime",
                "KVANT_TEST_MODEL": "model.gguf",
                "KVANT_PROGRAMS": "programs",
                "KVANT_PYTHON_DLLS": "python",
            }
            variables = {name: str(self.folder / file) for name, file in variables.items()}
            tests = ROOT / "tests" / "windows" / "test_windows.py"
            done = subprocess.run([sys.executable, tests], env={**os.environ, **variables})
            self.say("tests/windows", done.returncode == 0, "passed")
            return
        status, text, said = self.generate("--stock", "f16")
        self.say("f16", status == 0 and "Madrid" in text, text.strip() or said)
        for cache in (("-k", "int-8"), ("--preset", "balanced")):
            status, own, said = self.generate(*cache)
            right = status == 0 and own == text and "KV cache" in said
            self.say(cache[1], right, own.strip() if right else own + said)


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if sys.platform == "win32":
        os.makedirs("/tmp", exist_ok=True)  # tests make their folders there
    native = Native(pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:])
    print(f"{native.machine} on {platform.platform()}", flush=True)
    for part in os.environ.get("KVANT_PARTS", "unit bytes selftest command").split():
        getattr(native, part)()
    sys.exit(f"{native.failed} failed" if native.failed else 0)


if __name__ == "__main__":
    main()
