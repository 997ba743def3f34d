"""The lines of vllm_serving.csv: requests that run at once in vLLM, in Qwen3 8B's shape, with the
same memory for every cache. Tables and figures take them from here."""

from results import like

FILE = "vllm_serving.csv"
RIVAL = "auto"
NAMES = {
    "auto": "bfloat16",
    "fp8": "fp8",
    "int4": "`int4`",
    "bdr4": "`bdr4`",
    "turboquant4": "`turboquant4`",
    "kvant": "`balanced`",
    "fast": "`fast`",
}
NUMBERS = {cache: number for number, cache in enumerate(NAMES)}  # of colours and marks
AT_ONCE = (1, 4, 16, 64, 128, 256)
SHAPE = ("device", "vllm", "model", "gib", "kind", "concurrency", "input", "output")


def line(results, cache, kind, at_once, input, column):
    """The newest measurement of a cache, or None."""
    of = {"kind": kind, "concurrency": at_once, "input": input, column: like(".+")}
    return results.maybe(FILE, {**of, "cache": cache})


def pair(results, cache, kind, at_once, input, column):
    """The newest measurement of a cache, and bfloat16's of the same run, or of another run on such
    a machine if that run did not measure it. None without both."""
    of = {"kind": kind, "concurrency": at_once, "input": input, column: like(".+")}
    both = {**of, "cache": cache}, {**of, "cache": RIVAL}
    same_run = results.pair(FILE, *both, (*SHAPE, "commit"))
    return same_run or results.pair(FILE, *both, SHAPE)
