"""Options of commands with a model (tools/engine.h), for those that pass them on to such commands."""

from .cli import Option

MODEL = Option("m", "model", "FILE", "model, a .gguf file")
RUNTIME = [
    Option("t", "threads", "N", "threads (default: CPUs this process may use)"),
    Option(
        None,
        "runtime",
        "DIR",
        "folder of llama.cpp's libraries (default: KVANT_RUNTIME,\nelse the one this build was configured with)",
    ),
    Option(None, "verbose", None, "pass on everything that llama.cpp says"),
]
CACHES = [
    Option(
        None,
        "preset",
        "NAME",
        "quality, balanced, small or tiny: about 5, 4, 3 and 2 bits\n(default balanced, where no cache is named)",
    ),
    Option(
        None, "config", "FILE", "a codec for each layer, from a settings file; kvant tune makes it"
    ),
    Option("k", "codec-k", "SPEC", "codec of keys; see kvant codecs"),
    Option("v", "codec-v", "SPEC", "codec of values (default: the one of the -k before it)"),
    Option(
        None,
        "stock",
        "TYPE",
        "llama.cpp's own cache instead: f16, q8_0, q5_1, q4_0,\n... or two as K/V: q8_0/q4_0",
    ),
    Option(
        None, "accel", None, "attention of the --stock before it by KVANT_ACCEL, on the\nsame cache"
    ),
    Option(
        None,
        "fp32",
        None,
        "attention of the -k before it in fp32: slow, to see what the\n"
        "integer products of the fast kernels cost",
    ),
    Option(
        None,
        "protect",
        "N",
        "the first N and the last N layers use another codec: of the -k\n"
        "or --preset before it, of all when it comes first (default 0)",
    ),
    Option(None, "protect-codec", "SPEC", "codec of these layers, keys and values (default f16)"),
    Option(
        None,
        "calibration",
        "FILE",
        "calibration, for all presets and some codecs (default:\n"
        "model.kvcal beside model.gguf); kvant calibrate makes it",
    ),
]


def check_model(command, model):
    if model is None:
        command.misuse(
            "no model given", "-m model.gguf; scripts/fetch.py model fetches a small one"
        )


def for_inspect(option):
    """Whether kvant inspect has the option: it computes nothing."""
    return option not in ("threads", "accel", "fp32")


def words_of(option, value):
    """The words of an option, to give to another command."""
    return [f"--{option}"] if value is None else [f"--{option}", value]
