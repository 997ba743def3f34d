"""transformers on a GPU: speed and memory of KvantCache next to transformers' own caches."""

from text import code, significant, table, times

FILE = "transformers.csv"
CACHES = {
    "kvant": "KvantCache",
    "dynamic": "DynamicCache",
    "static": "StaticCache, compiled",
    "quanto": "QuantizedCache, quanto 4 bits",
}
SHAPES = ((8, 32768), (1, 131072))


def _line(results, cache, batch, context):
    return results.newest(FILE, {"cache": cache, "batch": batch, "context": context})


def transformers_speed(results):
    """Tokens per second of generate() with KvantCache and transformers' caches, 8B shape, H200."""
    rows = []
    for cache, name in CACHES.items():
        row = [code(name.split(",")[0]) + "".join(name.partition(",")[1:])]
        for batch, context in SHAPES:
            line, rival = (_line(results, c, batch, context) for c in (cache, "dynamic"))
            speed = line.number("tokens_per_s")
            row += [significant(speed), times(speed / rival.number("tokens_per_s"))]
        rows.append(row)
    names = [f"{batch} x {context:,}" for batch, context in SHAPES]
    heading = [x for name in names for x in (f"{name}, tokens/s", f"{name}, times `DynamicCache`")]
    return table(["cache", *heading], *rows)


def transformers_memory(results):
    """GB of GPU memory that these caches take when full, and the most while decoding, H200."""
    rows = []
    for cache, name in CACHES.items():
        row = [code(name.split(",")[0]) + "".join(name.partition(",")[1:])]
        for batch, context in SHAPES:
            line = _line(results, cache, batch, context)
            for column in ("cache_bytes", "decode_bytes"):
                row.append(f"{line.number(column) / 1e9:.2f}" if line[column] else "")
        if any(row[1:]):
            rows.append(row)
    names = [f"{batch} x {context:,}" for batch, context in SHAPES]
    heading = [x for name in names for x in (f"{name}, cache", f"{name}, decoding")]
    return table(["GB", *heading], *rows)
