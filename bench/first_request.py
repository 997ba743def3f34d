#!/usr/bin/env python3
"""What a server's first request does to the answers of later ones: runs the integration test that measures it and keeps its figures.

    bench/first_request.py build/bin/test_plugin_first_request bench/results/first_request.csv

Rows: the first request, mean KL divergence of 80 later next-token distributions from the f16 cache, default preset, no calibration.
"""

import pathlib
import re
import subprocess
import sys

import record

LINE = re.compile(r"after (ordinary text|none|\d+ tokens (?:of \"[^\"]*\"|in no order))(?::)? ([0-9.]+)")


def main():
    program, path = sys.argv[1], pathlib.Path(sys.argv[2])
    done = subprocess.run([program], capture_output=True, text=True)
    found = LINE.findall(done.stdout + done.stderr)
    if done.returncode != 0 or len(found) < 2:
        sys.exit("first_request: the test failed; nothing was written")
    about = {"machine": record.machine(), "commit": record.commit(), "command": pathlib.Path(program).name}
    record.write_rows(path, [{"first_request": what.replace("\n", "\\n"), "kld_mean": kld, **about} for what, kld in found])


if __name__ == "__main__":
    main()
