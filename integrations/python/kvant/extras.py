"""Packages that parts of kvant need and that `pip install kvant` leaves out: PyTorch and
transformers."""

from __future__ import annotations

import importlib
import importlib.util
import re
from importlib import metadata
from typing import Any

EXTRAS = ("torch", "transformers")  # names of packages and of kvant's extras that bring them


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _installed(package: str) -> str | None:
    """Its version, without importing it where that can be had; None: it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        found = importlib.util.find_spec(package) and importlib.import_module(package)
        return str(getattr(found, "__version__", "0")) if found else None


def needs(extra: str, package: str, oldest: str = "") -> None:
    """ImportError with the command that installs it where a package is missing or older."""
    version = _installed(package)
    if version is None:
        raise ImportError(f"kvant needs {package} here: pip install 'kvant[{extra}]'", name=package)
    if oldest and _numbers(version) < _numbers(oldest):
        words = f"kvant needs {package} {oldest} or newer here, and {version} is installed"
        raise ImportError(f"{words}: pip install -U 'kvant[{extra}]'", name=package)


def missing(name: str, error: ImportError) -> Any:
    """In place of kvant.NAME where its package is missing or old, so that help, dir and TAB work: a
    function that says it."""
    words = (
        str(error)
        if "pip install" in str(error)
        else f"{error.name} is missing: pip install 'kvant[transformers]'"
    )

    def unavailable(*arguments: Any, **options: Any) -> Any:
        raise ImportError(f"kvant.{name}: {words}", name=error.name)

    unavailable.__name__ = unavailable.__qualname__ = name
    unavailable.__module__ = "kvant"
    unavailable.__doc__ = f"Not usable here: {words}"
    return unavailable
