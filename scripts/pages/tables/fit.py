"""Memory of KV caches with models that people know: bench/fit.py, which asks the plug-in."""

from text import code, size, table

CONTEXTS = (8192, 32768, 131072)
CACHES = {"f16": "f16", "q8_0": "q8_0", "balanced": "kvant balanced", "small": "kvant small"}


def _models(results):
    return list(dict.fromkeys(line["model"] for line in results.lines("fit.csv")))


def will_it_fit(results):
    """Memory of a full cache by model and context, everything counted that a CPU's cache keeps."""
    rows = []
    for model in _models(results):
        for context in CONTEXTS:
            wanted = {"model": model, "memory": "cpu", "context": context}
            lines = [results.newest("fit.csv", {**wanted, "cache": cache}) for cache in CACHES]
            sizes = [size(line.number("kv_bytes")) for line in lines]
            rows.append([model, f"{context // 1024}k", *sizes])
    return table(["model", "tokens", *map(code, CACHES.values())], *rows)
