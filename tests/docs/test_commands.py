"""Types the marked commands of a page into a new folder, as a reader would.

    test_commands.py docs/start/search.md [--long]

The markers are described in blocks.py. The test assumes a page's remaining steps: kvant is on PATH,
installed in  /.local and known to Python, and the folder has `examples`, `model.gguf` and
`text.txt`. The program llama-completion is the runtime's, or else completion.c.

Environment: KVANT_BUILD, KVANT_MODEL, KVANT_TEXT, KVANT_LIB, KVANT_COMPLETION.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import blocks

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ["KVANT_BUILD"])
PAGE = pathlib.Path(sys.argv.pop(1)).resolve()
LONG = "--long" in sys.argv
if LONG:
    sys.argv.remove("--long")


def programs():
    """{name on PATH: file}"""
    stock = pathlib.Path(os.environ.get("KVANT_LIB", "")) / "llama-completion"
    ours = os.environ.get("KVANT_COMPLETION", "")
    return {
        "kvant": BUILD / "bin" / "kvant",
        "python3": pathlib.Path(sys.executable),
        "llama-completion": stock if os.access(stock, os.X_OK) else pathlib.Path(ours),
    }


def prepare(folder):
    """The environment of a reader who has done a page's remaining steps."""
    (folder / "bin").mkdir()
    for name, file in programs().items():
        if file.is_file():
            (folder / "bin" / name).symlink_to(file)
    work = folder / "work"
    work.mkdir()
    (work / "examples").symlink_to(ROOT / "examples")
    for name, variable in (("model.gguf", "KVANT_MODEL"), ("text.txt", "KVANT_TEXT")):
        if os.environ.get(variable):
            (work / name).symlink_to(os.environ[variable])
    install = ["cmake", "--install", BUILD, "--prefix", folder / ".local"]
    subprocess.run(install, check=True, capture_output=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KVANT", "GGML", "LLAMA_"))}
    return work, {
        **env,
        "HOME": str(folder),
        "PATH": f"{folder / 'bin'}:{env['PATH']}",
        "PYTHONPATH": str(ROOT / "integrations" / "python"),
        "KVANT_LIBRARY": str(BUILD / "lib" / "libkvant.so"),
    }


def run(kind, block, folder, env):
    program = ["python3", "-c", block] if kind == "python" else ["sh", "-e", "-c", block]
    return subprocess.run(
        program,
        cwd=folder,
        env=env,
        text=True,
        timeout=1500,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        errors="replace",
    )


class Commands(unittest.TestCase):
    def test_commands_do_what_the_page_says(self):
        left_out = ("tiny",) if LONG else ("tiny", "long")
        found = [(k, block) for k, block in blocks.marked(PAGE.read_text()) if k not in left_out]
        self.assertTrue(found, f"{PAGE.name} marks no command")
        with tempfile.TemporaryDirectory() as folder:
            work, env = prepare(pathlib.Path(folder))
            printed = ""
            for kind, block in found:
                if kind in blocks.SHOWN:
                    missing = blocks.not_printed(block, printed, kind == "exactly")
                    said = f"{PAGE.name} shows lines that were not printed:\n{printed}"
                    self.assertEqual(missing, [], said)
                    continue
                done = run(kind, block, work, env)
                printed = done.stdout
                self.assertEqual(done.returncode, 0, f"{PAGE.name}:\n{block}\n{printed}")


if __name__ == "__main__":
    unittest.main()
