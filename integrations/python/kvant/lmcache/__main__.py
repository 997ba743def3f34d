"""python -m kvant.lmcache ...: LMCache's own command, with the serde "kvant"."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from lmcache.cli.main import main as run

        from . import register

        register()
    except ImportError as error:
        sys.exit(f"kvant: LMCache is needed ({error}): python3 -m pip install lmcache")
    run()


if __name__ == "__main__":
    main()
