#!/usr/bin/env python3
"""Runs ctest and says at the end which tests this machine skipped.

    scripts/run_tests.py BUILD [arguments of ctest]

ctest counts a skipped test as a success, and does not mention a part of a test that was skipped.
This program lists both by name, with the reason, from ctest's JUnit file (BUILD/tests.xml). It
finds whole tests, cases of Python's unittest, and lines "skipped: ..." of test programs, such as
CPU levels. Exit status: ctest's own."""

import collections
import os
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

SLOWEST = 20
SKIPPED_LINE = re.compile(r"^(?:\[ +\w+ +\] )?skipped: (.+)$", re.MULTILINE)
# test_full_disk (__main__.Kept.test_full_disk) ... skipped 'the reason'. A docstring takes an extra
# line.
SKIPPED_CASE = re.compile(
    r"^(test_\w+) \([^)]*\)(?:\n[^\n]*)? \.\.\. skipped ['\"](.+)['\"]$", re.MULTILINE
)


class Outcome:
    def __init__(self, case):
        self.name = case.get("name")
        self.seconds = float(case.get("time") or 0)
        self.output = case.findtext("system-out") or ""
        self.failed = case.get("status") == "fail"
        self.skipped = case.get("status") in ("notrun", "disabled")

    def reason(self):
        said = SKIPPED_LINE.search(self.output)
        return said.group(1) if said else "said no reason"

    def parts(self):
        """The skipped parts of a test that ran: (what, which test)."""
        lines = [(line.strip(), self.name) for line in SKIPPED_LINE.findall(self.output)]
        return lines + [
            (f"{case}: {reason}", self.name) for case, reason in SKIPPED_CASE.findall(self.output)
        ]


def outcomes(path):
    return [Outcome(case) for case in ElementTree.parse(path).getroot().iter("testcase")]


def report(tests):
    """The lines below ctest's own."""
    skipped = [test for test in tests if test.skipped]
    failed = [test for test in tests if test.failed]
    parts = collections.defaultdict(list)
    for test in tests:
        for what, name in [] if test.skipped else test.parts():
            if name not in parts[what]:
                parts[what].append(name)
    lines = [
        "",
        "Slowest: "
        + ", ".join(
            f"{test.name} {test.seconds:.0f} s"
            for test in sorted(tests, key=lambda test: -test.seconds)[:SLOWEST]
        ),
    ]
    if skipped or parts:
        lines += ["", "Not tested on this machine:"]
        lines += [f"  {test.name}: {test.reason()}" for test in skipped]
        lines += [f"  {what} ({', '.join(names)})" for what, names in sorted(parts.items())]
    if failed:
        lines += ["", "Failed:"] + [f"  {test.name}" for test in failed]
    return lines + [
        "",
        f"{len(tests) - len(skipped) - len(failed)} passed, {len(failed)} failed, {len(skipped)} "
        "skipped",
    ]


def main():
    if len(sys.argv) < 2 or not pathlib.Path(sys.argv[1], "CTestTestfile.cmake").exists():
        print(
            "usage: run_tests.py BUILD [arguments of ctest]; BUILD is a folder configured with "
            "KVANT_BUILD_TESTS",
            file=sys.stderr,
        )
        return 2
    junit = pathlib.Path(sys.argv[1], "tests.xml").resolve()
    junit.unlink(missing_ok=True)
    # OpenMP's threads, PyTorch's and some llama.cpp's, spin at barriers for milliseconds. Next to
    # other work a test can take a hundred times as long then. unit.test_openmp unsets this.
    environment = {"GOMP_SPINCOUNT": "5000"} | os.environ
    # Otherwise ctest cuts the output of tests that pass to 1 KiB, which may end before the list of
    # CPU levels.
    done = subprocess.run(
        [
            "ctest",
            "--test-dir",
            sys.argv[1],
            "--output-on-failure",
            "--no-tests=error",
            "--test-output-size-passed",
            "1000000",
            "--output-junit",
            junit,
            *sys.argv[2:],
        ],
        env=environment,
    )
    if junit.exists():
        print("\n".join(report(outcomes(junit))), flush=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
