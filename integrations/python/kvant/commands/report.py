"""`kvant report`: measures a model's caches with other commands and makes a page of the results.

The results of a step go to a JSON file next to the page when the step ends, and the page is written
after every step. So an interrupted report is a valid one, and the same command continues. The
evaluation, which takes longest, can also continue in the middle of its step."""

import os
import sys
import time
from dataclasses import dataclass, field

from .. import system
from . import child, cli, model_options, report_file, report_page, report_plan

MANUAL_TEXT = "kvant:manual"

# A report compares caches, so its default is a list and not a single preset.
PRESET = model_options.CACHES[0]._replace(
    help="quality, balanced, small or tiny: about 5, 4, 3 and 2 bits\n"
    "(default: the list of all caches)"
)
COMMAND = cli.Command(
    name="report",
    usage="-m MODEL -o PAGE.html [-f TEXT] [--quick] [--config FILE]... [-k SPEC [-v SPEC]]...\n"
    "                    [--stock TYPE]... [--preset NAME]...",
    about="Measures quality, memory, speed and retrieval of a model with many KV caches and\n"
    "makes one HTML page of it that needs no network. Without -k, --stock or\n"
    "--preset: a list of presets, codecs and llama.cpp's types; --config adds to either.",
    options=[
        model_options.MODEL,
        PRESET,
        *model_options.CACHES[1:],
        *model_options.RUNTIME,
        *cli.options("""\
  -f, --file FILE         text to measure on; not the one that a calibration saw (default:
                          kvant:manual, a frozen copy of kvant's manual)
  -o, --output FILE       page, for example report.html; results go next to it, to report.json
      --from FILE         make the page of such results, measuring nothing
  -c, --ctx N             tokens of a chunk of the evaluation (default 2048; 1024 with --quick)
      --chunks N          chunks of it (default 2; 1 with --quick)
      --longest N         longest context of needles and speed (default 4096; 1024 with --quick)
      --sensitivity FILE  rows of kvant tune --json, for the section on layers
      --quick             the presets, q8_0 and q4_0 at short contexts: a first look in minutes
      --json              print the results; progress as JSON lines on stderr
"""),
    ],
    notes="""\
Shows first how long it will take. Ctrl-C leaves a page with all complete results; the same
command continues.

example:
  kvant report -m model.gguf -f text.txt -o report.html""",
)


@dataclass
class Settings:
    model: str = None
    text: str = MANUAL_TEXT
    output: str = None
    source: str = None  # --from
    sensitivity: str = None
    calibration: str = None
    n_ctx: int = None
    n_chunks: int = None
    longest: int = None
    threads: int = None
    quick: bool = False
    json: bool = False
    configs: list = field(default_factory=list)  # words, as the steps are given them
    files: list = field(default_factory=list)  # of settings files
    common: list = field(default_factory=list)
    # The words of all three that kvant inspect has, in the order of the command line.
    caches: list = field(default_factory=list)


FIELDS = {
    "model": ("model",),
    "file": ("text",),
    "output": ("output",),
    "from": ("source",),
    "sensitivity": ("sensitivity",),
    "quick": ("quick",),
    "json": ("json",),
    "ctx": ("n_ctx", cli.whole, 8, 1 << 24),
    "chunks": ("n_chunks", cli.whole, 1, 1 << 20),
    "longest": ("longest", cli.whole, 512, 1 << 24),
}
COMMON = ("threads", "runtime", "verbose", "calibration")


def _read_options(words):
    settings = Settings()
    to = settings.configs  # options that belong to a configuration are added after it
    for option, value in COMMAND.parse(words):
        if not cli.accept(settings, FIELDS, option, value):
            if option in ("config", "codec-k", "stock", "preset"):
                to = settings.files if option == "config" else settings.configs
            passed = model_options.words_of(option, value)
            if model_options.for_inspect(option):
                settings.caches += passed
            (settings.common if option in COMMON else to).extend(passed)
            if option == "calibration":
                settings.calibration = value
            elif option == "threads":
                settings.threads = cli.whole("--threads", value, 1, 1 << 16)
    settings.n_ctx = settings.n_ctx or (1024 if settings.quick else 2048)
    settings.n_chunks = settings.n_chunks or (1 if settings.quick else 2)
    settings.longest = settings.longest or (1024 if settings.quick else 4096)
    return settings


def _beside(page, suffix):
    """ "report.html" and ".json" are "report.json"."""
    path = os.path.splitext(page)[0] + suffix
    if path == page:
        cli.fail(f"report: -o {page}: choose a name that ends with .html")
    return path


def _inspect(settings):
    """Returns facts about model and text, and ends the command when a cache does not suit the
    model: a report that runs for an hour must fail at its beginning. The default list has presets,
    so it needs the calibration next to the model."""
    default = [] if settings.configs else ["--preset", "balanced"]
    rows = child.rows_or_leave(
        ["inspect", "-m", settings.model, "-f", settings.text, "--json", *settings.caches, *default]
    )
    facts = rows[0]
    facts["calibration"] = settings.calibration or next(
        (row["calibration"] for row in rows if row["calibration"]), None
    )
    return facts


def _measure_speed(settings):
    """Tokens per second of the f16 cache, measured in seconds and used only for estimates."""
    words = "bench model --json -p 256 -n 8 -r 1 --stock f16 -m".split()
    return child.rows_or_leave([*words, settings.model, *settings.common])[0]


def _describe(settings, facts):
    n_cpus = system.processors()
    about = {
        "kvant": facts["kvant"],
        "runtime": facts["runtime"],
        "machine": f"{system.processor_name()}, {n_cpus} threads",
        "threads": settings.threads or n_cpus,
        "model": facts["model"],
        "model_file": os.path.basename(settings.model),
        "model_fingerprint": facts["model_fingerprint"],
        "n_ctx_train": facts["n_ctx_train"],
        "text": os.path.basename(settings.text),
        "text_fingerprint": facts["text_fingerprint"],
        "ctx": settings.n_ctx,
    }
    if facts["calibration"]:
        about["calibration"] = os.path.basename(facts["calibration"])
    return {**about, "date": time.strftime("%Y-%m-%d", time.gmtime())}


def _check_lengths(settings, facts):
    n_ctx, limit, n_tokens = settings.n_ctx, facts["n_ctx_train"], facts["text_tokens"]
    if n_ctx > limit:
        cli.fail(f"report: a context of {n_ctx} tokens is longer than the model's limit of {limit}")
    if n_tokens // 2 < n_ctx:
        cli.fail(
            f"report: {settings.text} has {n_tokens} tokens, "
            f"but contexts of {n_ctx} need at least {2 * n_ctx}",
            "choose a longer text or a smaller -c",
        )


def _earlier_steps(path, about):
    """The steps of an earlier run. Results of another model, text or version of kvant are not mixed
    with new results."""
    if not os.path.exists(path):
        return []
    advice = "choose another -o, or remove that file"
    old = report_file.load(path, advice)
    for key in ("model_fingerprint", "text_fingerprint", "kvant", "runtime", "machine"):
        if old["about"].get(key) != about[key]:
            cli.fail(f"report: {path} has results of another {key}", advice)
    return old["steps"]


def _add_sensitivity(results, path):
    rows = report_file.read_json(path)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        cli.fail(
            f"report: --sensitivity {path} is not a JSON array of objects",
            "kvant tune --json prints them",
        )
    report_file.set_step(results, "sensitivity", "kvant tune", "complete", 0, rows)


def _plan(settings, facts):
    speed = _measure_speed(settings)
    request = report_plan.Request(
        model=settings.model,
        text=settings.text,
        state=_beside(settings.output, ".state"),
        needles=_beside(settings.output, ".needles"),
        quick=settings.quick,
        n_ctx=settings.n_ctx,
        n_chunks=settings.n_chunks,
        longest=settings.longest,
        n_ctx_train=facts["n_ctx_train"],
        prefill_tps=speed["prefill_tps"],
        decode_tps=speed["decode_tps"],
        calibrated=facts["calibration"] is not None,
        common=settings.common,
        configs=settings.configs,
        settings=settings.files,
        families=frozenset(row["family"] for row in child.rows_or_leave(["codecs", "--json"])),
    )
    absent = report_plan.absent_families(request)
    if absent and not settings.configs and not settings.quick:
        cli.complain(f"report: this build has no {', '.join(absent)}, so the page leaves them out")
    return report_plan.make(request)


class Report:
    """The results so far, and the files that hold them."""

    def __init__(self, settings, results, steps):
        self.settings, self.results, self.steps, self.failed = settings, results, steps, False
        # Steps that this command line does not have would be in the page without being in the plan.
        planned = {"sensitivity", *(step.name for step in steps)}
        results["steps"] = [step for step in results["steps"] if step["name"] in planned]

    def keep(self, complete):
        self.results["complete"] = complete
        report_file.save(_beside(self.settings.output, ".json"), self.results)
        report_page.write(self.settings.output, self.results)

    def has(self, step):
        return report_file.has(self.results, step.name, step.command_line())

    def measure(self, step, progress):
        """Measures a step. The page marks a step that fails, and all further steps are measured."""
        result = child.run(step.words, progress, step.seconds, step.name)
        state = (
            "complete"
            if result.code == cli.OK and result.rows is not None
            else "partial"
            if result.code == cli.INTERRUPTED
            else "failed"
        )
        if state == "failed":
            self.failed = True
            cli.complain(
                f"report: step {step.name} failed (exit code {result.code}): {step.command_line()}"
            )
        report_file.set_step(
            self.results, step.name, step.command_line(), state, result.seconds, result.rows or []
        )
        self.keep(False)

    def measure_all(self):
        ahead = [step for step in self.steps if not self.has(step)]
        seconds = sum(step.seconds for step in ahead)
        if not self.settings.json:
            print(
                f"kvant: report: {len(self.steps)} steps, about {seconds / 60 + 0.5:.0f} minutes; "
                "Ctrl-C leaves a page with all complete results",
                file=sys.stderr,
            )
        progress = cli.Progress(seconds, self.settings.json)
        for step in ahead:
            if cli.interrupted():
                break
            self.measure(step, progress)
        progress.end()
        self.keep(not cli.interrupted() and not self.failed)
        return cli.INTERRUPTED if cli.interrupted() else cli.RUNTIME if self.failed else cli.OK


def _finish(settings, results, code):
    if settings.json:
        cli.print_json(results)
    elif code == cli.OK:
        print(settings.output)
    if code == cli.INTERRUPTED:
        cli.complain(
            f"report: stopped; {settings.output} is a partial page, "
            "and the same command continues from here"
        )
    if not report_page.has_figures() and code != cli.RUNTIME:
        cli.hint(
            "this build has no plotting library, so the page has tables only: "
            "make fetches it (scripts/fetch.py plot)"
        )
    return code


def _measure(settings):
    cli.catch_interrupt()
    facts = _inspect(settings)
    _check_lengths(settings, facts)
    results = report_file.new()
    results["about"] = _describe(settings, facts)
    results["steps"] = _earlier_steps(_beside(settings.output, ".json"), results["about"])
    if settings.sensitivity is not None:
        _add_sensitivity(results, settings.sensitivity)
    report = Report(settings, results, _plan(settings, facts))
    return _finish(settings, results, report.measure_all())


def _render(settings):
    results = report_file.load(settings.source)
    report_page.write(settings.output, results)
    return _finish(settings, results, cli.OK)


def main(words):
    settings = _read_options(words)
    if settings.output is None:
        COMMAND.misuse("no output given", "-o report.html")
    if settings.source is None:
        if settings.text == "-":
            COMMAND.misuse(
                "every step reads the text again, so it cannot be standard input", "-f text.txt"
            )
        model_options.check_model(COMMAND, settings.model)
    cli.check_can_write("report", settings.output)
    return _measure(settings) if settings.source is None else _render(settings)
