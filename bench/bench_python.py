#!/usr/bin/env python3
"""The time that Python adds to the library: CSV on stdout. Import times are of a new interpreter,
minus the time of an empty program. Encode times compare kvant.Codec.encode with the library's
function on the same rows, on one core, alternating. Each is the least CPU time of many rounds.

    bench/bench_python.py > bench/results/python.csv"""

import csv
import os
import pathlib
import subprocess
import sys
import time

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "integrations" / "python"
sys.path.insert(0, str(PACKAGE))

import numpy as np  # noqa: E402

import kvant  # noqa: E402
import record  # noqa: E402
from kvant.library import library  # noqa: E402

ROWS, ROUNDS = 4096, 150
PROGRAMS = {
    "import kvant": "import kvant",
    "import, encode a page": "import numpy, kvant; "
    "kvant.Codec('int-4', 128).encode(numpy.zeros((64, 128), 'float32'))",
    "import numpy": "import numpy",
}


def cpu_of(program):
    environment = os.environ | {"PYTHONPATH": str(PACKAGE)}
    before = os.times()
    subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {program}"],
        env=environment,
        check=True,
    )
    after = os.times()
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def least(calls):
    found = [[] for _ in calls]
    for _ in range(ROUNDS):
        for times, call in zip(found, calls):
            start = time.process_time()
            call()
            times.append(time.process_time() - start)
    return map(min, found)


def encode_times(spec, role):
    codec = kvant.Codec(spec, 128, role)
    rows = np.random.default_rng(1).standard_normal((ROWS, 128), np.float32)
    pages = codec.encode(rows)
    call, handle = library().kvant_codec_encode, codec.handle
    at, to = rows.ctypes.data, pages.ctypes.data

    def straight():
        for i in range(ROWS // 64):
            call(handle, None, at + i * 64 * 128 * 4, 128, 0, 64, to + i * codec.page_bytes)

    return least((lambda: codec.encode(rows), straight))


def main():
    rows = csv.writer(sys.stdout)
    where = record.machine(), record.commit()
    rows.writerow(("what", "python", "library", "unit", "machine", "commit"))
    times = {
        name: min(cpu_of(program) for _ in range(20))
        for name, program in {"": "", **PROGRAMS}.items()
    }
    for name in PROGRAMS:
        rows.writerow((name, f"{times[name] - times['']:.3f}", "", "s", *where))
    for spec in ("int-4", "turboquant-4", "trellis-4"):
        ours, theirs = (1e6 * seconds / ROWS for seconds in encode_times(spec, "k"))
        rows.writerow(
            (f"encode {spec}", f"{ours:.3f}", f"{theirs:.3f}", "us per row of 128", *where)
        )


if __name__ == "__main__":
    main()
