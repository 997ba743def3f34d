"""The papers' claims, measured: synthetic figures, long contexts, and facts found in long texts."""

from text import code, divergence, table

LONG = {
    "SmolLM2": ("8192", "4096", "8191"),
    "Qwen2.5": ("32768", "16384", "32767"),
    "Gemma-3": ("32768", "16384", "32767"),
}
CACHES = {
    "q8_0": "q8_0",
    "q8_0, not rotated": "q8_0, not rotated",
    "fp8": "fp8",
    "q4_0": "q4_0",
    "q4_0, not rotated": "q4_0, not rotated",
    "int-4": "int-4",
    "bdr-4": "bdr-4",
    "hqmq-s96r4": "hqmq-s96r4:book=random,scale=norm",
    "octopus-4": "octopus-4:scale=norm",
    "octopus-4, its paper's recipe": "octopus-4_scale-norm_recent-32",
    "turboquant-4": "turboquant-4:scale=norm",
    "innerq-base": "innerq-base",
    "innerq-hybrid": "innerq-hybrid",
    "kivi-2": "kivi-2",
}


def _caches():
    """(label, cache, whether calibrated for all positions)"""
    for name, spec in CACHES.items():
        words = name.split(", ")
        yield ", ".join([code(words[0]), *words[1:]]), spec, False
    yield "`balanced` (default)", "balanced", False
    yield "`balanced`, calibrated with `--positions`", "balanced", True


def long_contexts(results):
    """KLD at the first 1024 and in the second half of long contexts, three models, transformers."""
    rows = []
    for label, cache, calibrated in _caches():
        row = [label]
        for model, (context, first, last) in LONG.items():
            of = {"model": model, "cache": cache, "context": context}
            of["calibrated"] = context if calibrated else "0"
            for start, end in (("0", "1023"), (first, last)):
                line = results.maybe("long_contexts.csv", {**of, "from": start, "to": end})
                row.append(divergence(line.number("kld_mean")) if line else "")
        if any(row[1:]):
            rows.append(row)
    places = [
        f"{m}, {p}" for m, (c, *_) in LONG.items() for p in ("first 1024", f"end of {int(c):,}")
    ]
    return table(["KV cache", *places], *rows)


def long_answers(results):
    """Facts found in long texts: one of five keys or a single one (RULER's form), and questions
    about WikiText.
    """
    columns = (
        ("SmolLM2", "multi", "8192"),
        ("SmolLM2", "reading", "8192"),
        ("Qwen2.5", "multi", "8192"),
        ("Qwen2.5", "reading", "8192"),
        ("Gemma-3", "multi", "32768"),
        ("Gemma-3", "single", "32768"),
    )
    rows = []
    for label, cache, calibrated in (("uncompressed", "f32", False), *_caches()):
        row = [label]
        for model, kind, tokens in columns:
            of = {"model": model, "cache": cache, "kind": kind, "tokens": tokens}
            of["calibrated"] = LONG[model][0] if calibrated else "0"
            line = results.maybe("needles.csv", of)
            row.append(f"{line.number('found'):.0f} of {line['texts']}" if line else "")
        if any(row[1:]):
            rows.append(row)
    names = {"multi": "keys", "single": "a single key", "reading": "questions"}
    return table(["KV cache", *(f"{m}, {names[k]}, {int(n):,}" for m, k, n in columns)], *rows)


def synthetic_figures(results):
    """How many of the papers' synthetic figures kvant meets, by table of the paper."""
    lines = [line for line in results.lines("distortion.csv") if line["source"]]
    for line in lines:
        results.used.append((line, []))
    rows = []
    for source in dict.fromkeys(line["source"].partition(":")[0] for line in lines):
        cells = [x for x in lines if x["source"].partition(":")[0] == source]
        met = sum(x["within"] == "True" for x in cells)
        rows.append([source, len(cells), met])
    rows.append(["all", len(lines), sum(x["within"] == "True" for x in lines)])
    return table(["paper and table", "figures", "met"], *rows)
