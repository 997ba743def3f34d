"""Helpers that run the kvant command for the tests in this folder."""

import json
import os
import pathlib
import subprocess
import tempfile

KVANT = os.environ["KVANT"]
PLUGIN = os.environ.get("KVANT_PLUGIN_FILE", "")
MODEL = os.environ.get("KVANT_MODEL", "")
# Some layers, tokens and neurons of the model (tests/small_model.py), for tests that do not depend
# on a model's quality, and the beginning of a text.
SMALL = os.environ.get("KVANT_SMALL_MODEL", MODEL)
N_LAYERS = int(os.environ.get("KVANT_SMALL_LAYERS", "30"))
N_VOCABULARY = int(os.environ.get("KVANT_SMALL_TOKENS", "49152"))
TEXT = os.environ.get("KVANT_TEXT", "")
ON_SMALL = ("-m", SMALL, "-f", TEXT)  # arguments of commands that run a model on a text
LIB = os.environ.get("KVANT_LIB", "")
SRC = os.environ.get("KVANT_SRC", "")
PAPERS = os.environ.get("KVANT_PAPERS", "1") == "1"  # whether this build has the papers' families


# Commands that compute with a model. They use one thread each, so that there can be as many tests
# at a time as there are cores. The threads of llama.cpp wait for one another by spinning, which
# takes cores from other tests. Tests that give -t test the effect of threads.
OF_A_MODEL = ("eval", "needle", "run", "calibrate", "capture", "tune", "report", "bench")


def command(*arguments):
    """The command line that runs kvant with these arguments."""
    words = [str(word) for word in arguments]
    one_thread = words[:1] and words[0] in OF_A_MODEL and "-m" in words and "-t" not in words
    return [KVANT, *words, *(["-t", "1"] if one_thread else [])]


def run(
    *arguments,
    code=None,
    stdin=None,
    stdout=subprocess.PIPE,
    timeout=300,
    errors=None,
    **environment,
):
    """Runs kvant and returns the finished process, whose exit code must be the given one. The
    caller's own kvant settings must not affect the test.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVANT", "GGML", "LLAMA_"))
    }
    if PLUGIN:
        env["KVANT_PLUGIN"] = PLUGIN
    env.update(environment)
    done = subprocess.run(
        command(*arguments),
        input=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        errors=errors,
        env=env,
        timeout=timeout,
    )
    assert code in (None, done.returncode), (done.returncode, done.stderr)
    return done


def rows_of(done):
    """Parses the JSON that a command which succeeded printed."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def temporary_folder(add_cleanup):
    """Makes a folder that is removed after the test or the class whose add_cleanup is given."""
    folder = tempfile.TemporaryDirectory()
    add_cleanup(folder.cleanup)
    return pathlib.Path(folder.name)


def program(folder, name, body):
    """An executable shell script that stands for a llama.cpp program."""
    path = pathlib.Path(folder) / name
    path.write_text("#!/bin/sh\n" + body + "\n")
    path.chmod(0o755)
    return path
