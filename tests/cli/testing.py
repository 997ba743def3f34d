"""Runs the kvant command for the tests in this folder."""

import os
import pathlib
import subprocess

KVANT = os.environ["KVANT"]
PLUGIN = os.environ.get("KVANT_PLUGIN_FILE", "")
MODEL = os.environ.get("KVANT_MODEL", "")
LIB = os.environ.get("KVANT_LIB", "")
SRC = os.environ.get("KVANT_SRC", "")


def run(*arguments, stdin=None, stdout=subprocess.PIPE, timeout=300, errors=None, **environment):
    """The finished process. The caller's own kvant settings must not leak into what is tested."""
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("KVANT", "GGML", "LLAMA_"))
    }
    if PLUGIN:
        env["KVANT_PLUGIN"] = PLUGIN
    env.update(environment)
    return subprocess.run(
        [KVANT, *map(str, arguments)],
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
