"""Kernels for GPUs alone, next to cuDNN and FlashAttention-3 in the same process."""

from text import code, table

SHAPES = {
    "1 x 65,536": ("1", "28", "4", "128", "65536"),
    "1 x 131,072": ("1", "32", "8", "128", "131072"),
    "8 x 32,768": ("8", "32", "8", "128", "32768"),
    "64 x 4,096": ("64", "32", "8", "128", "4096"),
}
COLUMNS = ("batch", "heads", "kv_heads", "head_dim", "tokens")
NAMES = {
    "cudnn-bf16": "cuDNN, bf16",
    "fa3-bf16": "FlashAttention-3, bf16, pages of 64",
    "fa3-fp8": "FlashAttention-3, fp8, pages of 64",
    "fa3-fp8 plain": "FlashAttention-3, fp8, one run per sequence",
}
# Parts of a multiprocessor: the measure in cuda_budget.csv, and how much of it a cycle can take.
PARTS = {
    "the page": ("cycles", 1),
    "shared memory and its copies": ("shared memory cycles", 1),
    "of these, look-ups": ("look-up wavefronts", 1),
    "instructions, at 4 a cycle": ("instructions", 4),
    "logic and `prmt`": ("logic cycles", 1),
    "device memory": ("device memory cycles", 1),
}
PHASES = (
    "pages found",
    "preceding kernels ended",
    "queries prepared",
    "sealed pages added",
    "exact pages added",
    "sums of warps added",
    "partial results left",
    "partial results added",
    "output written",
)
CODECS = ("int-4", "turboquant-4", "trellis-4", "octopus-4", "hqmq-s96r4")


def _shape(shape, **more):
    return {**dict(zip(COLUMNS, shape)), **more}


def _microseconds(line):
    return f"{line.number('us'):.0f}" if line else ""


def cuda_decode(results):
    """Microseconds of decode attention of one layer on an H200, by sequences x tokens."""
    rows = []
    for codec in ("cudnn-bf16", "fa3-bf16", "fa3-fp8", "fa3-fp8 plain", *CODECS):
        rival = codec.startswith("fa3")
        more = {"codec": codec, **({"query tokens": "1"} if rival else {})}
        file = "cuda_fa3.csv" if rival else "cuda_attention.csv"
        lines = [results.newest(file, _shape(shape, **more)) for shape in SHAPES.values()]
        rows.append([NAMES.get(codec, code(codec)), *map(_microseconds, lines)])
    return table(["us per layer, H200", *SHAPES], *rows)


def _fastest(results, shape, codec, tokens):
    """A rival's line. cuDNN's line is the faster of two calls: one with query tokens, one with
    further heads in their place."""
    of = _shape(shape, **{"query tokens": tokens})
    ways = [codec, f"{codec} as heads"] if codec.startswith("cudnn") else [codec]
    lines = [results.maybe("cuda_fa3.csv", {**of, "codec": way}) for way in ways]
    return min((line for line in lines if line), key=lambda line: line.number("us"))


def cuda_query_tokens(results):
    """Microseconds of attention of 1 to 16 query tokens at 8 x 32,768 on an H200."""
    counts = ("1", "4", "16")
    shape, rows = SHAPES["8 x 32,768"], []
    for codec in ("cudnn-bf16", "fa3-bf16", "fa3-fp8", "fa3-fp8 plain"):
        lines = [_fastest(results, shape, codec, n) for n in counts]
        rows.append([NAMES[codec], *map(_microseconds, lines)])
    for codec in CODECS:
        lines = [
            results.maybe("cuda_prefill.csv", _shape(shape, codec=codec, **{"query tokens": n}))
            for n in counts
        ]
        rows.append([code(codec), *map(_microseconds, lines)])
    return table(
        ["us per layer, H200", *(f"{n} query token{'' if n == '1' else 's'}" for n in counts)],
        *rows,
    )


def cuda_append(results):
    """Microseconds to append and to seal keys and values of 8 kv heads of 128 on an H200."""
    rows = []
    columns = (
        ("append", "1"),
        ("append", "64"),
        ("append", "8192"),
        ("seal", "1"),
        ("seal", "8192"),
    )
    for codec in CODECS:
        found = []
        for operation, tokens in columns:
            of = {"codec": codec, "operation": operation, "tokens": tokens, "head_dim": "128"}
            found.append(results.maybe("cuda_append.csv", of))
        rows.append([code(codec), *(f"{x.number('us'):.1f}" if x else "" for x in found)])
    return table(["us, H200", *(f"{what} {int(n):,}" for what, n in columns)], *rows)


def cuda_budget(results):
    """What a page of 64 tokens costs a multiprocessor in decode attention, 8 x 32,768, H200."""
    of = _shape(SHAPES["8 x 32,768"], codec="trellis-4")
    lines = {
        name: results.newest("cuda_budget.csv", {**of, "measure": measure})
        for name, (measure, _) in PARTS.items()
    }
    whole = lines["the page"].number("a page")
    rows = []
    for name, line in lines.items():
        cycles = line.number("a page") / PARTS[name][1]
        rows.append([name, f"{cycles:.0f}", f"{100 * cycles / whole:.0f} %"])
    return table(["`balanced`, a page of keys and values", "cycles", "of the time"], *rows)


def cuda_phases(results):
    """When the last warp of decode attention ends each phase in llama.cpp, 8B shape, H200."""
    rows = []
    for phase in PHASES:
        found = [
            results.newest("cuda_phases.csv", {"phase": phase, "tokens": tokens})
            for tokens in ("600", "7000", "28000")
        ]
        rows.append([phase, *(f"{line.number('last warp us'):.1f}" for line in found)])
    return table(["us after the first block began, tokens:", "600", "7,000", "28,000"], *rows)
