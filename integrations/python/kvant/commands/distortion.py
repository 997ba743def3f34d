"""kvant bench distortion: measures the papers' synthetic tables and compares the results with the
papers' figures.

A cell is a line of papers.csv: a figure, where it is printed (source; `empty`: arithmetic or an aim
of our own), the codec it was printed for and how that is measured (distortion_probe.py). The
command collects the probes that the chosen cells need, runs them, and then computes the cells from
them. So an interrupted run still prints every cell whose probe is complete."""

import concurrent.futures
import csv
import difflib
import math
import os
import pathlib
import statistics
import threading

from .. import system
from . import cli
from .table import Column, fixed, print_columns, print_table

COMMAND = cli.Command(
    name="bench distortion",
    usage="[--table NAME]... [-k SPEC]... [--quick] [--json]",
    about="Repeats the synthetic experiments of the papers with this build's codecs: the same\n"
    "head_dim, rows, queries and seeds. Needs NumPy and no model.",
    options=cli.options("""\
  -k, --codec SPEC        instead of the papers' tables the errors of this codec; repeat for several
  -t, --table NAME        octopus-1, octopus-4, octopus-5, octopus-6, octopus-7, needle,
                          turboquant, derived, trellis, size or covering; repeat for several
                          (default all)
      --quick             fewer and smaller draws: seconds, with wider errors
      --json              one JSON array of flat objects
"""),
    notes="""\
A cell is within when it differs from the paper's figure by at most 2 %, or half a unit
of the last printed digit and three standard errors of a difference of two measurements.
A codec that this build lacks is never within. A footnote marks cells whose figure cannot be
met, and that are within of the figure that distortion.csv derives instead.
Figures without a source are arithmetic and aims of our own, and are counted apart.

With -k: D is the relative squared error, 'D, best scale' the part that is left when rows are
made longer or shorter, slope what inner products shrink to, 'ip error' the squared error of
one, times head_dim. 1024 rows and 16 queries of 64 seeds; +- is the standard error.

Exit status: 1 when a cell without a footnote is not within, else 0.
Ctrl-C prints all complete results.""",
)


# ---- measuring ----


def measure(probes, json):
    """Runs the probes in parallel, as many as this process may use cores. False after Ctrl-C."""
    progress = cli.Progress(sum(probe.work for probe in probes), json)
    one_at_a_time = threading.Lock()

    def run(probe):
        def measured(rows):
            with one_at_a_time:
                progress.add(rows, probe.spec)

        probe.run(lambda: not cli.interrupted(), measured)

    with concurrent.futures.ThreadPoolExecutor(system.processors()) as pool:
        waiting = [pool.submit(run, probe) for probe in probes]
        while waiting:  # Windows notices Ctrl-C only between two waits
            finished, waiting = concurrent.futures.wait(waiting, 0.2, "FIRST_COMPLETED")
            for probe in finished:
                probe.result()
    progress.end()
    return not cli.interrupted()


def mean_and_error(values):
    """The mean and its standard error; a single value has no standard error."""
    values = [float(value) for value in values]
    several = len(values) > 1
    error = statistics.stdev(values) / math.sqrt(len(values)) if several else math.nan
    return statistics.fmean(values), error


# A metric computes a number from one seed: x is from the codec, y from the reference codec.
OF_SEED = {
    "mean": lambda x: x,
    "root": lambda x: x,  # of the mean
    "one_minus": lambda x: 1 - x,
    "difference": lambda x, y: x - y,
    "change": lambda x, y: 100 * (x / y - 1),
    "change_of_gap": lambda x, y: 100 * ((1 - x) / (1 - y) - 1),
}


def gigabytes(layers, tokens, bits):
    """The size of a cache of 8 kv heads of head_dim 128."""
    return layers * 8 * 128 * 2 * tokens * bits / 8 / 1e9


OF_SIZE = {
    "nominal_bits": lambda nominal, true: nominal,
    "true_bits": lambda nominal, true: true,
    "times_smaller": lambda nominal, true: 16 / nominal,  # than fp16
    "ratio": lambda nominal, true: 16 / true,
    "gigabytes_70b": lambda nominal, true: gigabytes(80, 131072, nominal),  # Llama-3-70B
    "gigabytes_7b": lambda nominal, true: gigabytes(32, 32768, nominal),  # Mistral-7B
}


def exponents(name, probe, reference):
    """d log series / d log codewords, seed by seed."""
    pairs = [p.series[series] for series in (name, "codewords") for p in (probe, reference)]
    return [math.log(x / y) / math.log(n / m) for x, y, n, m in zip(*pairs)]


def evaluate(cell, probe, reference):
    """The cell's figure, measured, and its standard error."""
    metric, name = cell["metric"], cell["series"]
    if metric in OF_SIZE:
        bits = (float(probe.series[which][0]) for which in ("nominal_bits", "true_bits"))
        return OF_SIZE[metric](*bits), 0.0
    if metric == "exponent":
        return mean_and_error(exponents(name, probe, reference))
    series = [p.series[name] for p in (probe, reference) if p is not None]
    mean, error = mean_and_error(map(OF_SEED[metric], *series))
    if metric == "root":
        mean = math.sqrt(mean)
        error /= 2 * mean
    return mean, error


# ---- judging ----


def printed_precision(figure):
    """Half a unit of the last digit, the precision that a printed figure promises."""
    return 0.5 * 10.0 ** -len(figure.partition(".")[2])


def agrees(figure, measured, error):
    """Whether a measurement agrees with a figure. The figure was measured, too: its standard error
    is assumed to equal ours, and it was rounded."""
    chance = 3 * math.sqrt(2) * (0 if math.isnan(error) else error) + printed_precision(figure)
    allowed = max(0.02 * abs(float(figure)), chance)
    return abs(measured - float(figure)) <= allowed * (1 + 1e-9)  # the edge is a decimal fraction


def is_within(cell, measured, error):
    if cell["bound"] == "least":
        return measured >= float(cell["figure"]) - 3 * error
    if cell["bound"] == "most":
        return measured <= float(cell["figure"]) + 3 * error
    return agrees(cell["figure"], measured, error)


def judge(cell, probe, reference):
    """The cell as --json prints it; None when its probes were not run.

    `expected` and `note` are filled in for a cell that misses its figure and meets the figure
    derived instead. The file papers.csv has no note without such a figure, because it would excuse
    any result."""
    row = {name: cell[name] for name in ("table", "row", "column", "source", "spec")} | {
        "paper": float(cell["figure"]),
        "measured": None,
        "difference": None,
        "error": None,
        "within": False,
        "expected": None,
        "note": probe.problem or (reference and reference.problem),
    }
    if row["note"]:
        return row
    if not probe.done or (reference and not reference.done):
        return None
    measured, error = evaluate(cell, probe, reference)
    row["measured"], row["error"] = measured, error
    row["difference"] = 100 * (measured / row["paper"] - 1)
    row["within"] = is_within(cell, measured, error)
    if not row["within"] and cell["expected"] and agrees(cell["expected"], measured, error):
        row["expected"], row["note"] = float(cell["expected"]), cell["note"]
    return row


VERDICTS = ("within", "outside", "outside with a footnote", "missing")


def verdict(row):
    if row["measured"] is None:
        return "missing"
    if row["within"]:
        return "within"
    return "outside" if row["expected"] is None else "outside with a footnote"


# ---- printing ----


def count(what, rows):
    if rows:
        verdicts = [verdict(row) for row in rows]
        each = ", ".join(f"{verdicts.count(word)} {word}" for word in VERDICTS)
        print(f"{len(rows)} {what}: {each}")


def print_cells(cells, rows):
    footnotes, lines = list(dict.fromkeys(row["note"] for row in rows if row["note"])), []
    for cell, row in zip(cells, rows):
        word = "missing" if row["measured"] is None else "yes" if row["within"] else "no"
        if row["note"]:
            word += f" ({footnotes.index(row['note']) + 1})"
        names = [row["table"], row["row"], row["column"], cell["figure"]]
        numbers = [fixed(row["measured"], 5), fixed(row["difference"], 2), fixed(row["error"], 5)]
        lines.append([*names, *numbers, word])
    headings = ["table", "row", "column", "paper", "measured", "diff %", "std err", "within"]
    print_table(headings, lines, ("table", "row", "column", "paper", "within"))
    print()
    for number, text in enumerate(footnotes, 1):
        print(f"({number}) {text}")
    count("figures of the papers", [row for row in rows if row["source"]])
    count("figures of our own", [row for row in rows if not row["source"]])


# ---- the papers' tables ----


def read_papers():
    """The cells; empty fields are None."""
    path = pathlib.Path(__file__).with_name("papers.csv")
    with open(path, newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    return [{name: text or None for name, text in line.items()} for line in lines]


def chosen_cells(names):
    cells = read_papers()
    tables = list(dict.fromkeys(cell["table"] for cell in cells))
    for name in names:
        if name not in tables:
            close = difflib.get_close_matches(name, tables, 1)
            COMMAND.misuse(
                f"there is no table '{name}'", *(f"did you mean '{word}'?" for word in close)
            )
    return [cell for cell in cells if not names or cell["table"] in names]


def papers_tables(cells, probe_of, quick, json):
    """Measures and prints the tables, and returns an exit code."""
    probes = {}
    for cell in cells:
        for spec in (cell["spec"], cell["reference"]):
            if spec and (spec, cell["setup"]) not in probes:
                probes[spec, cell["setup"]] = probe_of(spec, cell["setup"], quick)
    complete = measure(probes.values(), json)
    pairs = []
    for cell in cells:
        its = [probes.get((spec, cell["setup"])) for spec in (cell["spec"], cell["reference"])]
        pairs.append((cell, judge(cell, *its)))
    shown = [pair for pair in pairs if pair[1] is not None]
    rows = [row for _, row in shown]
    if json:
        cli.print_json(rows)
    else:
        print_cells([cell for cell, _ in shown], rows)
    if not complete:
        return cli.INTERRUPTED
    return cli.RUNTIME if {"outside", "missing"} & {verdict(row) for row in rows} else cli.OK


# ---- any codec ----


def of_spec(probe):
    """The errors of a codec on rows in the setup of OCTOPUS's Table 1."""
    mean, error = {}, {}
    for name in ("relative", "cos", "slope", "ip_square", "true_bits"):
        mean[name], error[name] = mean_and_error(probe.series[name]) if probe.done else (None, None)
    return {
        "spec": probe.spec,
        "head_dim": probe.head_dim,
        "bits": mean["true_bits"],
        "relative": mean["relative"],
        "relative_se": error["relative"],
        "rescaled": 1 - mean["cos"] ** 2 if probe.done else None,
        "cos": mean["cos"],
        "slope": mean["slope"],
        "ip_square": mean["ip_square"],
        "note": probe.problem,
    }


COLUMNS_OF_SPEC = (
    Column("spec", "spec"),
    Column("bits", "bits", 3),
    Column("relative", "D", 5),
    Column("relative_se", "+-", 5),
    Column("rescaled", "D, best scale", 5),
    Column("cos", "cos", 5),
    Column("slope", "slope", 4),
    Column("ip_square", "ip error", 4),
    Column("note", "note"),
)


def errors_of_specs(specs, probe_of, quick, json):
    """Measures and prints the errors, and returns an exit code."""
    probes = [probe_of(spec, "fidelity", quick) for spec in specs]
    complete = measure(probes, json)
    rows = [of_spec(probe) for probe in probes if probe.done or probe.problem]
    if json:
        cli.print_json(rows)
    else:
        print_columns(COLUMNS_OF_SPEC, rows)
    if not complete:
        return cli.INTERRUPTED
    return cli.RUNTIME if any(probe.problem for probe in probes) else cli.OK


# ---- the command ----


def import_probe():
    """The class Probe. An error when this Python lacks a module that it needs."""
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # codecs share the cores; NumPy's threads would fight them
    from ..library import Error, library
    from .distortion_probe import Probe

    try:
        library()
    except Error as error:
        cli.fail(f"bench distortion: {error}")
    return Probe


def main(words):
    given = COMMAND.parse(words)
    specs = [value for name, value in given if name == "codec"]
    tables = [value for name, value in given if name == "table"]
    quick, json = (any(name == switch for name, _ in given) for switch in ("quick", "json"))
    if specs and tables:
        hint = "the tables are the papers', -k measures any codec"
        COMMAND.misuse("--table and -k exclude each other", hint)
    cells = chosen_cells(tables)
    probe_of = import_probe()
    cli.catch_interrupt()
    if specs:
        return errors_of_specs(specs, probe_of, quick, json)
    return papers_tables(cells, probe_of, quick, json)
