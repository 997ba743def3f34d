"""The script that tools/python_command.c starts for `kvant NAME WORDS...`: it runs python3
.../kvant/commands NAME WORDS..."""

import os
import sys

if sys.version_info < (3, 9):  # the message works in older interpreters, too
    sys.stderr.write(
        "kvant: %s needs Python 3.9 or newer, %s is %d.%d\n"
        % ((sys.argv[1], sys.executable) + sys.version_info[:2])
    )
    sys.stderr.write("  hint: set KVANT_PYTHON to a newer one\n")
    sys.exit(1)

# Modules come from the folder with the package, not from the one with this file, which the
# embeddable Python of Windows does not put on the path. `python3 -m` would look in the working
# directory first, where anybody's files may be.
here = os.path.dirname(os.path.abspath(__file__))
sys.path[: sys.path[0] == here] = [os.path.dirname(os.path.dirname(here))]

from kvant.commands import cli  # noqa: E402

if __name__ == "__main__":
    sys.exit(cli.run(sys.argv[1], sys.argv[2:]))
