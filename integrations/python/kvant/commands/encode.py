"""kvant bench encode: the time to write a row into the cache on one core, compared with the f16
cache."""

import time

import numpy as np

import kvant
from kvant import library

from . import benchmarks, cli, specs
from .table import Column

USUAL = (
    "int-4 bdr-4 turboquant-4 turboquant-3 trellis-4 octopus-4:round=scalar octopus-4 hqmq-s96r4 "
    "innerq-base"
).split()
PAGES = 4
ROWS = PAGES * library.PAGE_TOKENS

COMMAND = cli.Command(
    name="bench encode",
    usage="[-k SPEC]... [--head-dim N] [--calibration FILE] [--rounds N] [--json]",
    about="""\
Measures the time to encode a row (one token of one kv head) on one core, for keys
and for values. f16, the usual cache, is always the first row and what ratios refer to.""",
    options=cli.options("""\
  -k, --codec SPEC        codec to measure, may be repeated (default: a list of common ones)
  -d, --head-dim N        numbers of a row, 1 to 512 (default 128)
      --calibration FILE  for codecs that need one; they use its layer 0, kv head 0
  -r, --rounds N          rounds, of which the median is given (default 31)
      --json              one JSON array of flat objects
"""),
    notes="""\
Rows are normally distributed. The time that Python takes for a call is measured, too, and
subtracted.

example:
  kvant bench encode -k trellis-4 -k octopus-4 --head-dim 128""",
)

COLUMNS = [
    Column("spec", "codec"),
    Column("role", "role"),
    Column("head_dim", "head_dim", 0),
    Column("level", "level"),
    Column("true_bits", "bits", 2),
    Column("microseconds", "us per row", 3),
    Column("ratio_to_f16", "x f16", 2),
]


class Subject:
    """One codec in one role, with pages to encode to. Runs call the library directly, with
    arguments made before."""

    def __init__(self, spec, role, rows, calibration):
        self.spec, self.role = spec, role
        self.codec = kvant.Codec(spec, rows.shape[1], role, calibration)
        self._rows = rows
        self._pages = np.zeros(PAGES * self.codec.page_bytes + library.PAGE_ALIGN, np.uint8)
        self._calls = self._arguments(library.PAGE_TOKENS)
        self._refused = self._arguments(0)  # no tokens: refused at once

    def _arguments(self, n_tokens):
        """The arguments of a call for each page."""
        head_dim = self._rows.shape[1]
        pages = -(-self._pages.ctypes.data // library.PAGE_ALIGN) * library.PAGE_ALIGN
        calls = []
        for page in range(PAGES):
            at = self._rows.ctypes.data + 4 * head_dim * library.PAGE_TOKENS * page
            to = pages + page * self.codec.page_bytes
            calls.append((self.codec.handle, None, at, head_dim, 0, n_tokens, to))
        return calls

    @staticmethod
    def _time(calls):
        """Seconds of the calls, and their statuses combined into one."""
        encode, status = library.library().kvant_codec_encode, 0
        start = time.perf_counter()
        for arguments in calls:
            status |= encode(*arguments)
        return time.perf_counter() - start, status

    def run(self):
        """Seconds per row."""
        seconds, status = self._time(self._calls)
        library.check(self.spec, status)
        return max(seconds - self._time(self._refused)[0], 1e-9) / ROWS

    def check(self):
        """A run fails by itself when a call fails, so there is nothing to check."""


def main(words):
    wanted, head_dim, rounds, calibration, json = [], 128, 31, None, False
    for name, value in COMMAND.parse(words):
        if name == "codec":
            wanted.append(value)
        elif name == "head-dim":
            head_dim = cli.whole("--head-dim", value, 1, library.MAX_HEAD_DIM)
        elif name == "rounds":
            rounds = cli.whole("--rounds", value, 1, 1001)
        elif name == "calibration":
            calibration = value
        else:
            json = True
    rows = benchmarks.normal(1, ROWS, head_dim)
    try:
        loaded = kvant.Calibration(calibration) if calibration is not None else None
        for spec in wanted:
            specs.check(COMMAND.name, "-k", spec, "k", loaded)
        subjects = [
            Subject(spec, role, rows, loaded)
            for spec in ["f16", *(wanted or benchmarks.possible(USUAL))]
            for role in "kv"
        ]
        seconds = benchmarks.measure(subjects, rounds, lambda subject: None)
    except kvant.Error as error:
        cli.fail(f"bench encode: {error}", "kvant codecs lists all codecs")
    f16 = dict(zip("kv", seconds))
    rows = []
    for subject, taken in zip(subjects, seconds):
        codec, usual = subject.codec, f16[subject.role]
        row = [subject.spec, subject.role.upper(), head_dim, library.cpu_level(), codec.true_bits]
        rows.append([*row, 1e6 * taken, taken / usual])
    benchmarks.show(COLUMNS, rows, json)
    return cli.OK
