"""`kvant tune`: measures how much each layer's keys and values matter to a model and gives each a
codec so that the whole loses least within a budget of bytes. It checks the result on other tokens
and writes a settings file. tuning.md explains the method.

This file has the order of the steps and the printing. tune_options.py has the command line, and
kvant.tuning has the arithmetic. The model runs in child processes: kvant inspect, capture and eval.
eval keeps every measurement in the file of --resume, so Ctrl-C loses nothing."""

import contextlib
import functools
import math
import os
import shutil
import sys
import tempfile

from . import child, cli, specs
from .table import Column, print_columns
from .tune_options import Options

QUERY_STEP = 8  # errors are computed on every 8th query
MAX_SETTINGS = 3


def import_tuning(options):
    """Imports kvant.tuning's modules. Candidates are computed in parallel, so NumPy may use only
    one thread for each. It reads this limit when it is first imported."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    from kvant import tuning
    from kvant.tuning import (
        captures,
        layer_error,
        probes,
        safetensors,
        sensitivity,
        settings,
        store,
    )  # noqa: F401

    return tuning


class Setting:
    """A choice for each site, and the facts about it. `k`, `v`: specs of a uniform setting."""

    def __init__(self, tune, choice, k=None, v=None):
        self.name, self.choice, self.k, self.v = "tuned", choice, k, v
        # In the context that the budget is for.
        self.bytes = tune.tuning.sensitivity.total_bytes(tune.locations, choice)
        costs = (location.cost(c) for location, c in zip(tune.locations, choice))
        self.predicted = tune.zero + sum(costs)  # on the tuning text
        self.kld = self.kld_se = None  # measured on other tokens


class Tune:
    """The steps of the command, in the order of run()."""

    def __init__(self, options, tuning, folder):
        self.options, self.tuning, self.folder, self.state = options, tuning, folder, None

    def run(self):
        self._check_probe()
        self._look_at_model()
        self._check_candidates()
        self._compute_errors()
        self._measure()
        self._choose()
        self._verify()
        self.writer.save(self.settings[0].choice, self.options.output)

    # ---- the model and the text ----

    def _check_probe(self):
        n_ctx = self.options.probe_ctx
        least = self.tuning.probes.least_context(n_ctx)
        if n_ctx < least:
            cli.fail(
                f"tune: half of a context of {n_ctx} tokens is measured, which a cache keeps "
                "as fp16",
                f"choose a longer context: --probe-ctx {least}",
            )

    def _look_at_model(self):
        o = self.options
        named = ["--calibration", o.calibration] if o.calibration else []
        facts = self._inspect(
            o.texts[0], ["--preset", "balanced", *named]
        )  # a preset uses the calibration next to the model
        limit, longest = facts["n_ctx_train"], max(o.n_ctx, o.probe_ctx)
        if 0 < limit < longest:
            cli.fail(
                f"tune: a context of {longest} tokens is longer than the model's limit of {limit}",
                "choose a smaller -c",
            )
        of_text, of_report = self.tuning.probes.contexts_needed(
            len(o.texts), o.parts, o.n_checks, o.report
        )
        self._check_text(o.texts[0], facts, of_text)
        for text, needed in [
            *((text, of_text) for text in o.texts[1:]),
            *([(o.report, of_report)] if o.report else []),
        ]:
            self._check_text(text, self._inspect(text, ["-k", "f16"]), needed)
        self.model, self.fingerprint = facts["model"], int(facts["model_fingerprint"], 16)
        self._load_calibration(facts["calibration"])
        self.state = o.resume or self._default_state(facts["runtime"])

    def _default_state(self, runtime):
        """The default file of --resume, named after everything that decides its results. It is next
        to the output if the usual folder cannot be made."""
        folder = os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvant", "tune"
        )
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError:
            folder = os.path.dirname(self.options.output)
        asked = self.options.probe_ctx, self.tuning.probes.PROBE_BATCH
        key = self.tuning.store.key_of([], self.fingerprint, runtime, *asked)
        return os.path.join(folder, key)

    def _inspect(self, text, config):
        words = ["-m", self.options.model, *self.options.inspected, "-f", text, *config, "--json"]
        return child.rows_or_leave(["inspect", *words])[0]

    def _check_text(self, text, facts, contexts):
        needed = contexts * self.options.probe_ctx
        if facts["text_tokens"] < needed:
            cli.fail(
                f"tune: {text} has {facts['text_tokens']} tokens, but {needed} are needed",
                "use a longer text, a smaller --probe-ctx, or fewer --probe-chunks and --chunks",
            )

    def _load_calibration(self, path):
        from kvant import Calibration

        self.calibration_path, self.calibration = path, Calibration(path) if path else None
        self.calibration_words = ["--calibration", path] if path else []

    def _check_candidates(self):
        self.candidates = self.tuning.sensitivity.default_candidates(self.calibration is not None)
        for role, tried in self.options.tried.items():
            for spec in tried:
                specs.check("tune", f"--try-{role}", spec, role, self.calibration)
            self.candidates[role] = tried or self.candidates[role]

    # ---- errors ----

    def _capture(self, folder, progress):
        o, paths = self.options, []
        for number, text in enumerate(o.texts):
            paths.append(os.path.join(folder, str(number)))
            n_tokens = o.parts * o.probe_ctx
            size = f"-n {n_tokens} -c {o.probe_ctx} --spread {o.parts}".split()
            files = ["-f", text, "-o", paths[-1], "--queries", str(QUERY_STEP)]
            words = ["capture", *o.of_model, *files, *size, "--json"]
            self._start(words, progress, n_tokens)
        return paths

    def _open_captures(self, opened):
        o = self.options
        folder = opened.enter_context(tempfile.TemporaryDirectory(dir=self.folder))
        progress = cli.Progress(len(o.texts) * o.parts * o.probe_ctx, o.json)
        paths = self._capture(folder, progress)
        progress.end()
        captures = [opened.enter_context(self.tuning.captures.Capture(path)) for path in paths]
        for layer in range(captures[0].n_layers):
            if layer not in captures[0].layers:
                cli.fail(
                    f"tune: layer {layer} of this model has no attention; "
                    "settings files need it in all layers"
                )
        return captures

    def _compute_errors(self):
        o, tuning = self.options, self.tuning
        checksum = self.calibration.info.checksum if self.calibration else None
        facts = self.fingerprint, checksum, o.parts, o.probe_ctx, QUERY_STEP
        store = tuning.store.Store(f"{self.state}.errors", tuning.store.key_of(o.texts, *facts))
        with contextlib.ExitStack() as opened:
            errors = tuning.sensitivity.Errors(
                store,
                functools.cache(lambda: self._open_captures(opened)),
                self.calibration,
                o.probe_ctx,
                self._n_threads(),
                leave_if_interrupted,
            )
            self._complete(errors)
        self.locations = tuning.sensitivity.locations_of(
            store, self.candidates, self.calibration, o.n_ctx
        )
        calibration = (self.calibration_path, self.calibration.info) if self.calibration else None
        self.writer = self.tuning.settings.Writer(
            self.locations, self.model, self.fingerprint, calibration
        )
        self.numbers = sum(location.numbers for location in self.locations)

    def _complete(self, errors):
        progress = None
        for n_layers in errors.complete(self.candidates):
            progress = progress or cli.Progress(n_layers, self.options.json)
            progress.add(1, "errors of the candidates, layer by layer")
        progress.end()

    def _n_threads(self):
        words = self.options.runtime
        return (
            cli.whole("--threads", words[words.index("--threads") + 1], 1, 1 << 16)
            if "--threads" in words
            else None
        )

    # ---- measurements ----

    def _start(self, words, progress, share):
        """Starts a kvant command that this command needs. It prints its errors itself."""
        result = child.run(words, progress, share, what=None)
        if result.code != cli.OK:
            progress.end()
            raise cli.Leave(result.code)
        leave_if_interrupted()

    def _measuring(self, state):
        words = [*self.options.of_model, "--resume", state, *self.calibration_words]
        return self.tuning.probes.Measuring(
            words,
            self.folder,
            self.writer,
            lambda words, n_tokens: self._start(words, self.progress, n_tokens),
        )

    def _measure(self):
        probes, o = self.tuning.probes, self.options
        contexts = probes.probe_contexts(o.texts, o.parts, o.probe_ctx)
        self.checks = probes.check_contexts(o.texts, o.parts, o.n_checks, o.probe_ctx, o.report)
        runs = probes.n_probes(self.locations) + 1  # and f16
        self.progress = cli.Progress(
            runs * contexts.n_tokens + (1 + MAX_SETTINGS) * o.n_checks * o.probe_ctx, o.json
        )
        self.zero = probes.probe(
            lambda settings: probes.divergences(self._measuring(self.state), settings, contexts),
            self.locations,
        )

    def _verify(self):
        probes = self.tuning.probes
        settings = {setting.name: setting.choice for setting in self.settings}
        self.progress.total -= (
            (MAX_SETTINGS - len(settings)) * self.options.n_checks * self.options.probe_ctx
        )
        found = [
            probes.divergences(self._measuring(f"{self.state}.check"), settings, contexts)
            for contexts in self.checks
        ]
        for i, setting in enumerate(self.settings):
            if found:
                setting.kld, setting.kld_se = probes.mean_and_error(
                    probes.np.concatenate([kld[i] for kld in found])
                )
        self.progress.end()

    # ---- the choice ----

    def _choose(self):
        o = self.options
        budget = o.bytes if o.bytes is not None else math.floor(o.bits * self.numbers / 8 + 1e-6)
        choice = self.tuning.sensitivity.choose(self.locations, budget)
        if choice is None:
            least = self.tuning.sensitivity.least_bytes(self.locations)
            cli.fail(
                f"tune: {budget:.0f} bytes ({8 * budget / self.numbers:.2f} bits) "
                "are less than the smallest candidates take: "
                f"{least:.0f} ({8 * least / self.numbers:.2f} bits)",
                "choose a larger budget, a longer -c (fewer fp16 pages) or coarser candidates",
            )
        self.settings = [Setting(self, choice)]
        self._add_uniform(budget)

    def _add_uniform(self, budget):
        """Adds the uniform settings that the chosen setting has to beat: the best one that fits the
        budget, and the best one with no fewer bytes than the chosen setting. The latter may take up
        to 2 % more, or as much as the next larger uniform setting."""
        uniform = [
            self._uniform(k, v)
            for k in range(len(self.candidates["k"]))
            for v in range(len(self.candidates["v"]))
        ]
        least = self.settings[0].bytes
        most = max(1.02 * least, min((s.bytes for s in uniform if s.bytes >= least), default=0))
        fits = min(
            (s for s in uniform if s.bytes <= budget), key=lambda s: s.predicted, default=None
        )
        above = min(
            (s for s in uniform if least <= s.bytes <= most),
            key=lambda s: s.predicted,
            default=None,
        )
        for setting, name in (
            (fits, "uniform within the budget"),
            (above, "uniform, no fewer bytes"),
        ):
            if setting is not None and setting not in self.settings:
                setting.name = name
                self.settings.append(setting)

    def _uniform(self, k, v):
        choice = [k if location.role == "k" else v for location in self.locations]
        return Setting(self, choice, self.candidates["k"][k], self.candidates["v"][v])


def leave_if_interrupted():
    if cli.interrupted():
        raise cli.Leave(cli.INTERRUPTED)


# ---- the report ----


def location_rows(tune):
    for location, c in zip(tune.locations, tune.settings[0].choice):
        words = tune.tuning.settings.one_or_all(location, c)
        yield {
            "layer": location.layer,
            "role": location.role.upper(),
            "spec": words if isinstance(words, str) else " | ".join(words),
            "site_bits": 8 * location.choices[c].bytes / location.numbers,
            "cost": location.cost(c),
            "error": location.choices[c].error,
            "probe_kld": location.measured,
            "probe_se": location.measured_se,
            "probe_error": location.probe_error,
        }


def setting_rows(tune):
    for s in tune.settings:
        yield {
            "setting": s.name,
            "k": s.k,
            "v": s.v,
            "bits": 8 * s.bytes / tune.numbers,
            "kv_bytes": s.bytes,
            "predicted": s.predicted,
            "kld_mean": s.kld,
            "kld_se": s.kld_se,
        }


LOCATION_COLUMNS = (
    Column("layer", "layer", 0),
    Column("role", "role"),
    Column("spec", "codec"),
    Column("site_bits", "bits", 2),
    Column("cost", "cost", 5),
    Column("error", "error", 5),
    Column("probe_kld", "probed", 5),
    Column("probe_se", "+-", 5),
    Column("probe_error", "its error", 5),
)
SETTING_COLUMNS = (
    Column("setting", "setting"),
    Column("k", "K"),
    Column("v", "V"),
    Column("bits", "bits", 3),
    Column("kv_bytes", "KV MiB", 2, 1 / (1 << 20)),
    Column("predicted", "predicted", 5),
    Column("kld_mean", "KLD mean", 5),
    Column("kld_se", "+-", 5),
)


def print_rows(tune):
    """Prints both kinds of lines in one array; fields that do not apply are null."""
    settings, locations = list(setting_rows(tune)), list(location_rows(tune))
    if tune.options.json:
        nothing = dict.fromkeys([*settings[0], *locations[0]])
        cli.print_json([{**nothing, **row} for row in [*settings, *locations]])
        return
    print_columns(LOCATION_COLUMNS, locations)
    print()
    print_columns(SETTING_COLUMNS, settings)


def main(words):
    from kvant import Error  # loads neither NumPy nor libkvant

    options = Options(words)
    cli.check_can_write("tune", options.output)
    tuning = import_tuning(options)
    cli.catch_interrupt()
    with tempfile.TemporaryDirectory(
        prefix=f"{os.path.basename(options.output)}.", dir=os.path.dirname(options.output) or "."
    ) as folder:
        options.texts = [keep_stdin(folder) if text == "-" else text for text in options.texts]
        options.report = keep_stdin(folder) if options.report == "-" else options.report
        tune = Tune(options, tuning, folder)
        try:
            tune.run()
        except (
            tuning.safetensors.Damaged,
            tuning.layer_error.Unsupported,
            Error,
            OSError,
        ) as error:
            cli.fail(f"tune: {error}")
        except cli.Leave as leave:
            if leave.code == cli.INTERRUPTED and tune.state is not None:
                print(
                    f"kvant: tune: the same command continues from here ({tune.state})",
                    file=sys.stderr,
                )
            raise
    print_rows(tune)
    return cli.OK


def keep_stdin(folder):
    """Copies standard input to a file: it can be read once, and several commands read the text."""
    path = os.path.join(folder, "standard input")
    with open(path, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    return path
