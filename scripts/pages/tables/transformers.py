"""transformers on a GPU: speed and memory of KvantCache next to transformers' own caches."""

from results import like
from text import code, significant, table, times

FILE = "transformers.csv"
RIVAL = "dynamic"
CACHES = {
    "kvant": "`KvantCache`",
    "dynamic": "`DynamicCache`",
    "static": "`StaticCache`, compiled",
    "quanto": "`QuantizedCache`, quanto 4 bits",
}
SHAPES = ((1, 4096), (8, 32768), (1, 131072))
RUN = ("machine", "commit", "batch", "context")


def _of(cache, batch, context):
    """A default KvantCache, or one of transformers' own."""
    preset = "balanced" if cache == "kvant" else ""
    return {"cache": cache, "preset": preset, "batch": batch, "context": context}


def _rows(cells):
    """A row per cache that was measured. cells(cache, shape) are the cells of one shape."""
    rows = [[name, *(x for s in SHAPES for x in cells(cache, s))] for cache, name in CACHES.items()]
    return [row for row in rows if any(row[1:])]


def _table(first, ways, rows):
    names = [f"{batch} x {context:,}" for batch, context in SHAPES]
    return table([first, *(f"{name}, {way}" for name in names for way in ways)], *rows)


def transformers_speed(results):
    """Tokens per second of generate() by cache and sequences x tokens, 8B shape, on a GPU."""

    def cells(cache, shape):
        pair = results.pair(FILE, _of(cache, *shape), _of(RIVAL, *shape), RUN)
        if not pair:
            return "", ""
        ours, rival = (line.number("tokens_per_s") for line in pair)
        return significant(ours), times(ours / rival)

    return _table("cache", ("tokens/s", f"times {code('DynamicCache')}"), _rows(cells))


def transformers_memory(results):
    """GB of GPU memory of a full cache, and the most while decoding, by cache, 8B shape."""

    def cells(cache, shape):
        line = results.maybe(FILE, {**_of(cache, *shape), "cache_bytes": like(".+")})
        if not line:
            return "", ""
        return (f"{line.number(column) / 1e9:.2f}" for column in ("cache_bytes", "decode_bytes"))

    return _table("GB", ("cache", "decoding"), _rows(cells))
