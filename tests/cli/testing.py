"""Runs the kvant command for the tests in this folder."""

import os
import pathlib
import subprocess

KVANT = os.environ["KVANT"]
PLUGIN = os.environ.get("KVANT_PLUGIN_FILE", "")
MODEL = os.environ.get("KVANT_MODEL", "")
# A few layers and tokens of it (tests/small_model.py), for what does not depend on a model's
# quality, and the beginning of a text.
SMALL = os.environ.get("KVANT_SMALL_MODEL", MODEL)
N_LAYERS = int(os.environ.get("KVANT_SMALL_LAYERS", "30"))
N_VOCABULARY = int(os.environ.get("KVANT_SMALL_TOKENS", "49152"))
TEXT = os.environ.get("KVANT_TEXT", "")
LIB = os.environ.get("KVANT_LIB", "")
SRC = os.environ.get("KVANT_SRC", "")
PAPERS = os.environ.get("KVANT_PAPERS", "1") == "1"  # the papers' families are in this build


# Commands that compute with a model. One thread each, so that as many tests as there are cores run side by side: llama.cpp's threads
# wait for one another by spinning, which takes the cores from other tests. What threads change is tested where -t is given.
OF_A_MODEL = ("eval", "needle", "run", "calibrate", "capture", "tune", "report", "bench")


def command(*arguments):
    """The command line that runs kvant with these arguments."""
    words = [str(word) for word in arguments]
    one_thread = words[:1] and words[0] in OF_A_MODEL and "-m" in words and "-t" not in words
    return [KVANT, *words, *(["-t", "1"] if one_thread else [])]


def run(*arguments, stdin=None, stdout=subprocess.PIPE, timeout=300, errors=None, **environment):
    """The finished process. The caller's own kvant settings must not leak into what is tested."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVANT", "GGML", "LLAMA_"))
    }
    if PLUGIN:
        env["KVANT_PLUGIN"] = PLUGIN
    env.update(environment)
    return subprocess.run(
        command(*arguments),
        input=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        errors=errors,
        env=env,
        timeout=timeout,
    )


def program(folder, name, body):
    """An executable shell script, to stand for a llama.cpp program."""
    path = pathlib.Path(folder) / name
    path.write_text("#!/bin/sh\n" + body + "\n")
    path.chmod(0o755)
    return path
