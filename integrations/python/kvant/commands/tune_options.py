"""The command line of `kvant tune`, checked as far as possible without the model. tune.py carries
the command out."""

from . import cli, model_options

# An fp16 page at the beginning is an eighth of 512 tokens but a 32nd of 2048. Errors that were
# measured at 512 tokens therefore say less about long contexts (tuning.md).
DEFAULT_PROBE = 2048
MAX_TEXTS, MAX_CANDIDATES = 16, 24

COMMAND = cli.Command(
    name="tune",
    usage="-m MODEL -f TEXT (--bits B | --kv-bytes N) [-c CTX] [-o model.kvant]\n"
    "                  [--calibration FILE]",
    about="""\
Finds a codec for the keys and the values of each layer, or of each kv head,
within a budget of memory. Measures how much the model changes when one layer is
coarse, computes what other codecs would do there, and solves for the budget.
Checks the result, and the best uniform settings, on other tokens. Needs NumPy.
Takes minutes, and seconds for another budget: measurements are kept.""",
    options=[
        model_options.MODEL,
        *cli.options("""\
  -f, --file FILE         text to tune on; - reads standard input; give several, of the kinds
                          that the model will read
      --bits B            bits per number that the cache may take in a context of -c
                          tokens: codes, scales and fp16 pages, which a short -c has
                          many of
      --kv-bytes N        or its bytes: K, M and G are KiB, MiB and GiB
  -c, --ctx N             context that the budget is for (default 4096)
  -o, --output FILE       settings file to write (default model.kvant)
      --calibration FILE  for better codecs; kvant calibrate makes it (default:
                          model.kvcal next to model.gguf)
      --report-text FILE  text to check the result on (default: what follows in -f's)
      --probe-ctx N       tokens of the contexts that errors are computed on, at
                          least 640 (default: 2048, or -c where that is less);
                          the model is measured on half of the first one
      --probe-chunks N    such contexts of each text, from its beginning to its end (default 2)
      --chunks N          such contexts for the result's check (default 2; 0: no check)
      --resume FILE       keep measurements in FILE, FILE.check and FILE.errors, and do not
                          repeat those in them (default: files of ~/.cache/kvant/tune)
      --try-k SPEC        candidate for keys, in place of the default ones; give it several
                          times, the coarsest first: that one is measured in every layer
      --try-v SPEC        the same for values
      --json              one JSON array of flat objects; progress in JSON lines on stderr
"""),
        *model_options.RUNTIME,
    ],
    notes="""\
Ctrl-C keeps all measurements; the same command continues from there. Other budgets,
contexts (-c) and finer candidates need no new measurements but the check's.

examples:
  kvant tune -m model.gguf -f code.txt -f prose.txt --bits 4 -c 32768
  kvant eval -m model.gguf -f other.txt --config model.kvant""",
)


def read_bytes(option, text):
    """A number that K, M or G may follow."""
    factor = 1024.0 ** (" KMG".index(text[-1]) if text[-1:] in ("K", "M", "G") else 0)
    number = text[:-1] if factor > 1 else text
    return factor * cli.real(option, number, 1 / factor, 1e15 / factor)


FIELDS = {
    "model": ("model",),
    "output": ("output",),
    "calibration": ("calibration",),
    "resume": ("resume",),
    "report-text": ("report",),
    "json": ("json",),
    "bits": ("bits", cli.real, 0.5, 16),
    "kv-bytes": ("bytes", read_bytes),
    "ctx": ("n_ctx", cli.whole, 64, 1 << 24),
    "probe-ctx": ("probe_ctx", cli.whole, 64, 1 << 20),
    "probe-chunks": ("parts", cli.whole, 1, 256),
    "chunks": ("n_checks", cli.whole, 0, 256),
}


class Options:
    """The command line, checked as far as possible without the model."""

    def __init__(self, words):
        self.model = self.calibration = self.report = self.resume = None
        self.bits = self.bytes = self.probe_ctx = None
        self.texts, self.tried, self.runtime, self.inspected = [], {"k": [], "v": []}, [], []
        self.output, self.n_ctx, self.parts, self.n_checks = "model.kvant", 4096, 2, 2
        self.json = False
        for option, value in COMMAND.parse(words):
            self._take(option, value)
        self._check()

    def _take(self, option, value):
        if option == "file":
            self.texts.append(value)
        elif option in ("try-k", "try-v"):
            self.tried[option[-1]].append(value)
        elif not cli.accept(self, FIELDS, option, value):
            self.runtime += model_options.words_of(option, value)
            if model_options.for_inspect(option):
                self.inspected += model_options.words_of(option, value)

    def _check(self):
        model_options.check_model(COMMAND, self.model)
        if not self.texts:
            COMMAND.misuse("no text given", "-f text.txt; scripts/fetch.py text makes one")
        if len(self.texts) > MAX_TEXTS:
            COMMAND.misuse(f"more than {MAX_TEXTS} texts are given")
        if max(map(len, self.tried.values())) > MAX_CANDIDATES:
            COMMAND.misuse(f"more than {MAX_CANDIDATES} candidates are given")
        if self.bits is None and self.bytes is None:
            COMMAND.misuse(
                "no budget given", "--bits 4, or --kv-bytes 64M, for a context of -c tokens"
            )
        if self.bits is not None and self.bytes is not None:
            COMMAND.misuse("--bits and --kv-bytes say the same thing: give one of them")
        self.probe_ctx = self.probe_ctx or min(self.n_ctx, DEFAULT_PROBE)

    @property
    def of_model(self):
        return ["-m", self.model, *self.runtime]
