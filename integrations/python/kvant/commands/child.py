"""Runs a subcommand of the `kvant` program, keeps the rows that it prints and follows its progress."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple, Optional

from . import cli


class Result(NamedTuple):
    code: int  # exit code; 128 + n after signal n
    rows: Optional[list]  # None when it printed none
    seconds: float


def _command_line(words):
    level = os.environ.get("KVANT_CPU")  # what kvant --cpu leaves to us
    return [os.environ.get("KVANT_COMMAND", "kvant"), *(["--cpu", level] if level else []), *words]


def _event(line):
    """The object of a line of --json's progress, else None."""
    try:
        event = json.loads(line) if line.startswith(b"{") else None
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


_passed_on = set()  # commands of one report say much alike: once is enough


def _pass_on(line, progress):
    """A message of the child. After Ctrl-C only kvant's own: what llama.cpp says of a computation that was stopped is no news."""
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
    """Progress is taken in, everything else is for the user. Returns how much was added."""
    told = 0.0
    for line in messages:
        event = _event(line)
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


def _rows(text):
    try:
        rows = json.loads(text)
    except ValueError:
        return None
    return rows if isinstance(rows, list) else None


def _stop(process):
    if process.poll() is None:
        process.send_signal(signal.SIGINT)


def run(words, progress=None, share=0.0, what=None):
    """words: "eval", ..., with --json among them. As the child gets on, up to `share` is added to the progress, and all of it when it
    ends well, under the name `what`, or what the child says of itself; its other messages pass through. Ctrl-C is passed on once, so that the child prints what is complete."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        # A session of its own: Ctrl-C on a terminal goes to this process only, which passes it on; twice would kill the child.
        with (
            subprocess.Popen(
                _command_line(words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
                start_new_session=True,
            ) as process,
            cli.when_interrupted(lambda: _stop(process)),
        ):
            told = _follow(process.stderr, progress, share, what)
            process.wait()
        output.seek(0)
        rows = _rows(output.read())
    if process.returncode == cli.OK and progress is not None:
        progress.add(share - told, what or "")
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return Result(code, rows, time.monotonic() - started)


def rows_or_leave(words):
    """The rows of a command that this one cannot go on without: it leaves with that command's exit code, which has said why."""
    result = run(words)
    if result.code != cli.OK:
        raise cli.Leave(result.code)
    if not result.rows:
        cli.fail(f"kvant {words[0]} printed no rows")
    return result.rows
