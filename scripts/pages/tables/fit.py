"""Memory of KV caches with models that people know: bench/fit.py, which asks the plug-in."""

from text import code, size, table

CONTEXTS = (8192, 32768, 131072)
CACHES = {"f16": "f16", "q8_0": "q8_0", "balanced": "kvant balanced", "small": "kvant small"}


def _models(results):
    return list(dict.fromkeys(line["model"] for line in results.lines("fit.csv")))


def _fits(results, memory):
    rows = []
    for model in _models(results):
        for context in CONTEXTS:
            wanted = {"model": model, "memory": memory, "context": context}
            lines = [results.newest("fit.csv", {**wanted, "cache": cache}) for cache in CACHES]
            sizes = [size(line.number("kv_bytes")) for line in lines]
            rows.append([model, f"{context // 1024}k", *sizes])
    return table(["model", "tokens", *map(code, CACHES.values())], *rows)


def will_it_fit(results):
    """Memory of a full cache by model and context, everything counted that a CPU's cache keeps."""
    return _fits(results, "cpu")


def will_it_fit_on_a_gpu(results):
    """Memory of a cache by model and context, everything counted that a GPU's cache keeps."""
    return _fits(results, "gpu")


# Llama-3.1-8B. A layer's new keys and values and its queries go to kvant as f32, and the result of
# attention comes back.
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 32, 8, 128
ROWS = LAYERS * 4 * HEAD_DIM * (2 * KV_HEADS + 2 * HEADS)


def bytes_over_the_bus(results):
    """Computed bytes per decoded token with a GPU that holds the weights. Two numbers count: the
    bytes that go over the bus, and the bytes that kvant reads from RAM. llama.cpp without KV
    offload copies the whole cache."""
    rows = []
    for context in CONTEXTS:
        wanted = {"model": "Llama-3.1-8B", "memory": "cpu", "context": context}
        lines = [results.newest("fit.csv", {**wanted, "cache": c}) for c in ("f16", "balanced")]
        stock, ours = (size(line.number("kv_bytes")) for line in lines)
        rows.append([f"{context // 1024}k", stock, size(ROWS), ours])
    head = ["tokens", "`-nkvo`, over the bus", "kvant, over the bus", "kvant, from RAM"]
    return table(head, *rows)
