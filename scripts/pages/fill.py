"""Finds the makers of tables, runs those that pages want, and compares pages with the result.

A maker is a public function in a module of scripts/pages/tables: `def vllm_speed(results)` makes
the table vllm-speed. It returns a list of Markdown lines, or one text for a value. Its docstring
says what the table shows.
"""

import importlib
import inspect
import pathlib

import markers
from results import Missing

HERE = pathlib.Path(__file__).resolve().parent


def makers():
    """{name: function} of all tables and values."""
    found = {}
    for file in sorted((HERE / "tables").glob("*.py")):
        for name, function in vars(importlib.import_module(f"tables.{file.stem}")).items():
            ours = inspect.isfunction(function) and function.__module__ == f"tables.{file.stem}"
            if not ours or name.startswith("_"):
                continue
            if found.setdefault(name.replace("_", "-"), function) != function:
                raise ValueError(f"two makers are called {name}")
    return found


def contents(results, found, wanted):
    """{name: what its maker returns}. Raises Missing with the name of the table."""
    made = {}
    for name in wanted:
        try:
            made[name] = found[name](results)
        except Missing as error:
            raise Missing(f"table {name}: {error}") from None
    return made


def faults(root, results, found):
    """Yields a text for each fault of a page, and (page, new text) for each page to be written."""
    texts = {page: page.read_text() for page in markers.pages(root)}
    used = {name for text in texts.values() for name in markers.names(text)}
    for name in sorted(set(found) - used):
        yield f"no page has the table {name}"
    try:
        made = contents(results, found, sorted(used & set(found)))
    except Missing as error:
        yield str(error)
        return
    for page, text in texts.items():
        try:
            new = markers.filled(text, made)
        except markers.Fault as fault:
            yield f"{page.relative_to(root)}: {fault}"
            continue
        if new != text:
            yield page, new
