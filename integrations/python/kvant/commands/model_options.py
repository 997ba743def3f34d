"""Options of commands that load a model, with the words of tools/engine.h, for Python commands that
pass these options on to such a command."""

from . import cli

[MODEL] = cli.options("  -m, --model FILE        model, a .gguf file")
RUNTIME = cli.options("""\
  -t, --threads N         threads (default: CPUs this process may use)
      --runtime DIR       folder of llama.cpp's libraries (default: KVANT_RUNTIME,
                          else the one this build was configured with)
      --verbose           print everything that llama.cpp logs
""")
CACHES = cli.options("""\
      --preset NAME       quality, balanced, small or tiny: about 5, 4, 3 and 2 bits
                          (default balanced, if no cache is named)
      --config FILE       a codec for each layer, from a settings file; kvant tune makes it
  -k, --codec-k SPEC      codec of keys; see kvant codecs
  -v, --codec-v SPEC      codec of values (default: the one of the -k before it)
      --stock TYPE        llama.cpp's own cache instead: f16, q8_0, q5_1, q4_0,
                          ... or two as K/V: q8_0/q4_0
      --accel             kvant computes attention on llama.cpp's own cache: on
                          the --stock before it
      --fp32              fp32 attention for the -k before it: slow, shows the error
                          of the fast kernels' integer products
      --protect N         the first N and the last N layers use another codec: of the -k
                          or --preset before it, of all when it comes first (default 0)
      --protect-codec SPEC
                          codec of these layers, keys and values (default f16)
      --calibration FILE  calibration, for all presets and some codecs (default:
                          model.kvcal next to model.gguf); kvant calibrate makes it
""")


def check_model(command, model):
    if model is None:
        command.misuse(
            "no model given", "give -m model.gguf; scripts/fetch.py model fetches a small one"
        )


def for_inspect(option):
    """Whether kvant inspect has the option: it computes nothing."""
    return option not in ("threads", "accel", "fp32")


def words_of(option, value):
    """The words of an option, to give to another command."""
    return [f"--{option}"] if value is None else [f"--{option}", value]
