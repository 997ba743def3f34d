"""The steps of `kvant report`, each one subcommand, with an estimate of its time; default
configurations, lengths and depths."""

import itertools
import os
import re
from dataclasses import dataclass, field

NEEDLES, TRIALS, PREFILL, DECODE, ROUNDS, MOST_COMPARED = 8, 2, 256, 16, 3, 6
QUICK_PREFILL = 64

# Codecs take longer than f16, and scoring takes additional time. Measured on small models, where
# both cost most.
EVAL_COST = 1.6
START_SECONDS = 2.0
LONGEST_SIZE = 32768  # tokens of the context that sizes are computed for: many have this memory

# Every family, and the points of it that somebody may choose.
EVERYTHING = """
--stock q8_0
--stock q5_1
--stock q5_0
--stock q4_1
--stock q4_0
--stock q8_0/q4_0
--preset quality
--preset balanced
--preset small
-k int-4:axis=channel,group=64 -v turboquant-4
-k int-3:axis=channel -v turboquant-3
-k int-4:axis=channel,group=64 -v trellis-4
-k trellis-4:center=first,norm=first -v trellis-4
-k trellis-4:center=first,norm=first -v trellis-3
-k trellis-3:center=first,norm=first -v trellis-3
-k trellis-4
-k trellis-3
-k trellis-2
-k turboquant-5:center=first
-k turboquant-4:center=first
-k turboquant-5
-k turboquant-4
-k turboquant-3
-k turboquant-2
-k octopus-4
-k octopus-3
-k polar-4
-k bdr-4
-k int-8
-k int-4
-k kivi-4
-k kivi-2:sink=32,recent=96
-k innerq-base
-k hqmq-s192r6:med3
-k addvq-k48r4
""".strip().splitlines()

WITH_CALIBRATION = """
-k turboquant-5:transform=file,feedback -v turboquant-5
-k turboquant-4:transform=file,feedback -v trellis-4
-k turboquant-4:transform=file -v turboquant-4
-k trellis-4:transform=file -v trellis-3
-k turboquant-3:transform=file,feedback -v trellis-3
-k trellis-3:transform=file -v trellis-2
-k trellis-2:transform=file -v trellis-2
-k hessian-4
""".strip().splitlines()

FEW = ["--stock q8_0", "--stock q4_0", "--preset quality", "--preset balanced", "--preset small"]

# The caches whose speed, memory and needles are compared.
COMPARED = [*FEW, "-k turboquant-4"]

# This cache has the bytes and the results of q8_0, so only its speed is measured.
ACCELERATED = "--stock q8_0 --accel"


@dataclass
class Request:
    """The values that the plan is made from."""

    model: str
    text: str
    state: str  # files of --resume
    needles: str
    quick: bool
    n_ctx: int  # of the evaluation
    n_chunks: int
    longest: int  # context of needles and speed, at most
    n_ctx_train: int  # the model's limit
    prefill_tps: float  # of the f16 cache, measured
    decode_tps: float
    calibrated: bool  # there is a calibration: its codecs, too
    families: frozenset  # of codecs that this build has
    common: list = field(
        default_factory=list
    )  # words that every step gets: --runtime, --threads, ...
    configs: list = field(
        default_factory=list
    )  # words of the user's configurations; empty: the default ones
    settings: list = field(default_factory=list)  # settings files, measured in any case


@dataclass
class Step:
    name: str  # "quality", "needle:1024", ...
    words: list
    seconds: float  # estimated

    def command_line(self):
        """ "kvant eval -m model.gguf ...", folders of files left out."""
        return " ".join(["kvant", *map(_without_folder, self.words)])


def _without_folder(word):
    return os.path.basename(word) if word.startswith(("/", ".")) else word


def _split(lines):
    return [word for line in lines for word in line.split()]


def _families_of(line):
    """The families in a line of the default lists: "-k int-4:axis=channel -v trellis-4" has int and
    trellis."""
    return {
        re.split("[-:]", spec)[0]
        for option, spec in zip(line.split()[::2], line.split()[1::2])
        if option in ("-k", "-v")
    }


def _possible(lines, request):
    return [line for line in lines if _families_of(line) <= request.families]


def absent_families(request):
    """Families of the default lists that this build lacks: builds without KVANT_PAPERS lack
    some."""
    return sorted(
        set().union(*map(_families_of, [*EVERYTHING, *WITH_CALIBRATION])) - request.families
    )


def _is_config(word):
    return word in ("--codec-k", "--stock", "--preset", "--config")


def _first(words, most):
    """At most `most` configurations of the words, each with the options that belong to it, and
    their number."""
    counts = list(itertools.accumulate(map(_is_config, words)))
    kept = [word for word, count in zip(words, counts) if count <= most]
    return kept, min(counts[-1] if counts else 0, most)


def _configs(request, lines, most):
    """The user's configurations, at most `most` of them, or the default lines, then the settings
    files; and their number."""
    own, n_own = _first(request.configs, most) if request.configs else (_split(lines), len(lines))
    files, n_files = _first(request.settings, most)
    return own + files, n_own + n_files


def _begin(request, command):
    return [*command.split(), "-m", request.model, "--json", *request.common]


def _eval(request, name, n_bins):
    lines = _possible(FEW if request.quick else EVERYTHING, request)
    words, n = _configs(request, lines, len(request.configs) + len(request.settings))
    calibrated = (
        _possible(WITH_CALIBRATION, request)
        if request.calibrated and not request.quick and not request.configs
        else []
    )
    bins = ["--by-position", str(n_bins)] if n_bins > 1 else []
    seconds = START_SECONDS
    if n_bins == 1:  # the evaluation by position only reads the results of this one
        tokens = request.n_ctx * request.n_chunks
        seconds += tokens * (1 + EVAL_COST * (n + len(calibrated))) / request.prefill_tps
    size = f"-c {request.n_ctx} --chunks {request.n_chunks}".split()
    begin = [*_begin(request, "eval"), "-f", request.text, *size, "--resume", request.state]
    return Step(name, [*begin, *bins, *words, *_split(calibrated)], seconds)


def _inspected(words):
    """The words that kvant inspect accepts: no options about computing."""
    kept, of_threads = [], False
    for word in words:
        if not of_threads and word not in ("--threads", "--accel", "--fp32"):
            kept.append(word)
        of_threads = word == "--threads"
    return kept


def _sizes(request):
    """The sizes of the evaluated caches, when the model's own context is full, or 32768 tokens of
    it."""
    evaluated = _eval(request, "quality", 1).words
    caches = [*evaluated[evaluated.index("--resume") + 2 :]]
    context = str(min(request.n_ctx_train, LONGEST_SIZE))
    words = ["inspect", "-m", request.model, "--json", *_inspected(request.common)]
    return Step(
        "sizes", [*words, "-c", context, "--stock", "f16", *_inspected(caches)], START_SECONDS
    )


def _needle(request, length):
    words, n = _configs(request, FEW if request.quick else COMPARED, MOST_COMPARED)
    trials = 1 if request.quick else TRIALS
    size = f"-c {length} -n {NEEDLES} -r {trials}".split()
    words = [*_begin(request, "needle"), *size, "--resume", request.needles, *words]
    seconds = START_SECONDS + 1.3 * (n + 1) * trials * length / request.prefill_tps
    return Step(f"needle:{length}", words, seconds)


def _speed(request, deepest):
    words, n = _configs(request, FEW if request.quick else COMPARED, MOST_COMPARED)
    if not request.configs:
        words, n = [*words, *ACCELERATED.split()], n + 1
    depths = [0, deepest] if request.quick else [0, deepest // 4, deepest]
    n_prefill = QUICK_PREFILL if request.quick else PREFILL
    prefill = (deepest + len(depths) * ROUNDS * n_prefill) / request.prefill_tps
    decode = len(depths) * ROUNDS * DECODE / request.decode_tps
    size = f"-d {','.join(map(str, depths))} -p {n_prefill} -n {DECODE} -r {ROUNDS}".split()
    words = [*_begin(request, "bench model"), *size, "--stock", "f16", *words]
    return Step("speed", words, START_SECONDS + 1.5 * (n + 1) * (prefill + decode))


def make(request):
    """Makes the plan: quality first, because most readers want it; the longest contexts last."""
    longest = min(request.longest, request.n_ctx_train)
    deepest = longest if longest + PREFILL <= request.n_ctx_train else longest // 2
    doubling = list(
        itertools.takewhile(lambda length: length <= longest, (512 << i for i in itertools.count()))
    )
    if request.quick:
        doubling = doubling[-1:]
    return [
        _eval(request, "quality", 1),
        _eval(request, "position", 8),
        _sizes(request),
        _speed(request, deepest),
        *(_needle(request, length) for length in doubling),
    ]
