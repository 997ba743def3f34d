"""The lines of rivals.csv that the page about other programs and its figure compare."""

FILE = "rivals.csv"
# Models on the page: their names in the CSV. transformers reads 4-bit files as 32-bit numbers.
FLOATS = {
    "SmolLM2-135M": ("SmolLM2-135M-float", "SmolLM2-135M"),
    "Qwen2.5-0.5B": ("Qwen2.5-Coder-0.5B-20k-float", None),
    "Gemma-3-270M": ("Gemma-3-270M-20k-float", None),
}
NOISY = {"Qwen2.5-1.5B, 4-bit weights": ("Qwen2.5-Coder-1.5B", None)}
MODELS = {2048: {**FLOATS, **NOISY}, 8192: FLOATS, 32768: FLOATS}


def on_gpu(line):
    return line["machine"].startswith("NVIDIA")


def cache_name(line):
    """The cache, and whether kvant ran on a GPU, where its cache has other bits and loses more."""
    return line["cache"] + (", GPU" if line["program"] == "kvant" and on_gpu(line) else "")


def newest(results, length, model, fits=lambda line: True):
    """{(program, cache): its newest line} at a length, for a model of the page."""
    found, (own, other) = {}, MODELS[length][model]
    for line in filter(fits, results.lines(FILE, {"length": length})):
        if line["model"] == own or (line["model"] == other and line["program"] == "transformers"):
            found.setdefault((line["program"], cache_name(line)), []).append(line)
    return {key: results.take(lines) for key, lines in found.items()}
