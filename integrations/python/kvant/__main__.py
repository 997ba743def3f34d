"""The command `kvant` of an installed wheel: becomes the program that the wheel carries."""

from __future__ import annotations

import os
import pathlib
import sys

from kvant import system


def main() -> None:
    """Replaces this process by kvant/bin/kvant, with the same words. Subcommands written in Python
    run in this interpreter (KVANT_PYTHON)."""
    name = "kvant.exe" if system.WINDOWS else "kvant"
    program = pathlib.Path(__file__).resolve().parent / "bin" / name
    os.environ.setdefault("KVANT_PYTHON", sys.executable)
    try:
        system.become(program, ["kvant", *sys.argv[1:]])
    except OSError as error:
        sys.exit(
            f"kvant: {program}: {error.strerror}; this package was installed without the program: "
            "build it with make"
        )


if __name__ == "__main__":
    main()
