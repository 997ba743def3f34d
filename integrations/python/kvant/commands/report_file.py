"""The raw results of `kvant report`, a JSON file beside the page:

  { "kvant_report": 1, "complete": true,
    "about": { "kvant", "runtime", "machine", "threads", "model", "model_file", "model_fingerprint", "n_ctx_train", "text",
               "text_fingerprint", "ctx", "calibration", "date" },
    "steps": [ { "name": "quality", "command": "kvant eval ...", "state": "complete", "seconds": 12.5, "rows": [ {...}, ... ] } ] }

Rows are what the command of the step printed. A file is checked as far as these commands read it; the page takes what it knows and
shows the rest as not measured.
"""

import json
import os

from . import cli

VERSION = 1


def new():
    return {"kvant_report": VERSION, "complete": False, "about": {}, "steps": []}


def _judge(root):
    """What is wrong with it, or None."""
    version = root.get("kvant_report") if isinstance(root, dict) else None
    if type(version) not in (int, float):
        return "is no result of kvant report"
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
            return "has a row that is no object"
    return None


def _refuse_constant(name):
    raise ValueError(f"{name} is no JSON")


def read_json(path):
    """What the file holds, or None where that is no JSON."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    except OSError as error:
        cli.fail(f"report: {path}: {error.strerror}")


def load(path, *hints):
    root = read_json(path)
    wrong = "is no JSON" if root is None else _judge(root)
    if wrong is not None:
        cli.fail(f"report: {path} {wrong}", *hints)
    return root


def replace(path, text):
    """Writes a file beside its place and renames it; an older one stays when that fails."""
    beside = f"{path}.part"
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(beside, path)
    except OSError as error:
        if os.path.exists(beside):
            os.remove(beside)
        cli.fail(f"report: cannot write {path}: {error.strerror}")


def save(path, results):
    replace(path, json.dumps(results, indent=1) + "\n")


def step(results, name):
    return next((step for step in results["steps"] if step["name"] == name), None)


def set_step(results, name, command, state, seconds, rows):
    """Replaces or adds a step. A report is shown to others, so rows say nothing of the folders of the machine that made it."""
    for row in rows:
        if isinstance(row.get("calibration"), str):
            row["calibration"] = os.path.basename(row["calibration"])
    old = step(results, name)
    if old is not None and old.get("command") == command and old.get("state") == "partial":
        seconds += old.get("seconds") or 0  # what the first attempt kept is not computed again
    made = {"name": name, "command": command, "state": state, "seconds": seconds, "rows": rows}
    if old is None:
        results["steps"].append(made)
    else:
        results["steps"][results["steps"].index(old)] = made


def has(results, name, command):
    """Whether the step was completed by that very command."""
    found = step(results, name)
    return (
        found is not None and found.get("state") == "complete" and found.get("command") == command
    )
