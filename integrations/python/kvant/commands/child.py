"""Runs a subcommand of the `kvant` program, keeps the results that it prints and follows its
progress."""

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple, Optional

from .. import system
from . import cli


class Result(NamedTuple):
    code: int  # exit code; 128 + n after signal n
    rows: Optional[list]  # None when it printed none
    seconds: float


def _command_line(words):
    level = os.environ.get("KVANT_CPU")  # set by kvant --cpu
    return [os.environ.get("KVANT_COMMAND", "kvant"), *(["--cpu", level] if level else []), *words]


def _parsed(text, kind):
    """The value that JSON has, if it is of this type; else None."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, kind) else None


_passed_on = set()  # the commands of a report print the same messages, which are shown once


def _pass_on(line, progress):
    """Shows a message of the child. After Ctrl-C it shows only kvant's messages: llama.cpp's
    complaints about a stopped computation say nothing new."""
    if cli.interrupted() and not line.startswith((b"kvant:", b"  hint:")):
        return
    if line in _passed_on and line.startswith(b"kvant:"):
        return
    _passed_on.add(line)
    if progress is not None:
        progress.clear()
    sys.stderr.buffer.write(line)
    sys.stderr.flush()


def _follow(messages, progress, share, what):
    """Adds the child's progress and shows its other messages. Returns how much was added."""
    told = 0.0
    for line in messages:
        event = _parsed(line, dict)  # a line of --json's progress
        if event is None:
            _pass_on(line, progress)
        elif (
            progress is not None
            and isinstance(event.get("fraction"), (int, float))
            and event.get("total")
        ):
            now = max(told, share * event["fraction"])
            progress.add(now - told, event.get("what", "") if what is None else what)
            told = now
    return told


def run(words, progress=None, share=0.0, what=None):
    """Runs a command with the words "eval", ..., which include --json. While the child works, up to
    `share` is added to the progress, and all of it when the child succeeds. The progress shows
    `what`, or without it the child's own label. The child's messages are shown. Ctrl-C is passed on
    once, so that the child prints its complete results."""
    if cli.interrupted() and not system.CAN_STOP:
        return Result(cli.INTERRUPTED, None, 0.0)
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        # Ctrl-C on a terminal reaches only this process, which passes it on. Two signals would kill
        # the child.
        with (
            system.start(
                _command_line(words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
            ) as process,
            cli.when_interrupted(lambda: system.stop(process)),
        ):
            told = _follow(process.stderr, progress, share, what)
            process.wait()
        output.seek(0)
        rows = _parsed(output.read(), list)
    if process.returncode == cli.OK and progress is not None:
        progress.add(share - told, what or "")
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return Result(code, rows, time.monotonic() - started)


def rows_or_leave(words):
    """The results of a command that this command cannot do without. If it fails, this command ends
    with its exit code; that command has printed why."""
    result = run(words)
    if result.code != cli.OK:
        raise cli.Leave(result.code)
    if not result.rows:
        cli.fail(f"kvant {words[0]} printed no results")
    return result.rows
