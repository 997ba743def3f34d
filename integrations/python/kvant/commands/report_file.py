"""The raw results of `kvant report`, a JSON file next to the page:

  { "kvant_report": 1, "complete": true,
    "about": { "kvant", "runtime", "machine", "threads", "model", "model_file",
               "model_fingerprint", "n_ctx_train", "text", "text_fingerprint", "ctx",
               "calibration", "date" },
    "steps": [ { "name": "quality", "command": "kvant eval ...", "state": "complete",
                 "seconds": 12.5, "rows": [ {...}, ... ] } ] }

Rows are the results that the command of the step printed. A file is checked as far as these
commands read it; the page shows the results that it knows, and the rest as not measured."""

import json
import os

from .. import system
from . import cli

VERSION = 1


def new():
    return {"kvant_report": VERSION, "complete": False, "about": {}, "steps": []}


def _why_unusable(root):
    """Returns why the results cannot be used, or None when they can."""
    version = root.get("kvant_report") if isinstance(root, dict) else None
    if type(version) not in (int, float):
        return "is not a result of kvant report"
    if version != VERSION:
        return "is of another version of kvant report"
    if not isinstance(root.get("about"), dict) or not isinstance(root.get("steps"), list):
        return 'has no "about" or no "steps"'
    for step in root["steps"]:
        if (
            not isinstance(step, dict)
            or not isinstance(step.get("name"), str)
            or not isinstance(step.get("rows"), list)
        ):
            return "has a step without a name or rows"
        if not all(isinstance(row, dict) for row in step["rows"]):
            return "has a row that is not an object"
    return None


def _refuse_constant(name):
    raise ValueError(f"{name} is not JSON")


def read_json(path):
    """The parsed file, or None when it is not JSON."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    except OSError as error:
        cli.fail(f"report: {path}: {error.strerror}")


def load(path, *hints):
    root = read_json(path)
    wrong = "is not JSON" if root is None else _why_unusable(root)
    if wrong is not None:
        cli.fail(f"report: {path} {wrong}", *hints)
    return root


def replace(path, text):
    """Writes the file as a whole; an older file stays when that fails."""
    try:
        system.write_file(path, text.encode())
    except OSError as error:
        cli.fail(f"report: cannot write {path}: {error.strerror}")


def save(path, results):
    replace(path, json.dumps(results, indent=1) + "\n")


def step(results, name):
    return next((step for step in results["steps"] if step["name"] == name), None)


def set_step(results, name, command, state, seconds, rows):
    """Replaces or adds a step. People show a report to others, so rows must not name folders of the
    machine that made it."""
    for row in rows:
        if isinstance(row.get("calibration"), str):
            row["calibration"] = os.path.basename(row["calibration"])
    old = step(results, name)
    if old is not None and old.get("command") == command and old.get("state") == "partial":
        seconds += old.get("seconds") or 0  # the results of the first attempt are kept
    made = {"name": name, "command": command, "state": state, "seconds": seconds, "rows": rows}
    if old is None:
        results["steps"].append(made)
    else:
        results["steps"][results["steps"].index(old)] = made


def has(results, name, command):
    """Whether this very command completed the step."""
    found = step(results, name)
    return (
        found is not None and found.get("state") == "complete" and found.get("command") == command
    )
