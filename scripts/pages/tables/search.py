"""Vector search: recall, speed and memory of kvant next to FAISS and the papers' codes."""

from results import like
from text import code, significant, table, thousands, times

FILE = "search.csv"
SETS = ("minilm", "words", "power", "offset", "gauss200")
ISOTROPIC = ("gauss200", "gauss1536", "gauss3072", "words")


def _recall(line, column="recall_10"):
    return f"{line.number(column):.3f}" if line else ""


def _next_to_each_other(results, heading, names):
    """names: {what a table calls an index: the index}, all on the sentence embeddings."""
    rows = []
    for name, index in names.items():
        line = results.newest(FILE, {"data": "minilm", "index": index})
        rows.append([name, line["bytes"], _recall(line)])
    return table([heading, "bytes per vector", "recall@10"], *rows)


def search_codecs(results):
    """Recall@10 and bytes per vector of kvant's codecs on 30,149 sentence embeddings of 384."""
    specs = (
        "turboquant-8",
        "trellis-4",
        "turboquant-4",
        "trellis-3:dims=240",
        "trellis-2",
        "turboquant-2",
        "turboquant-1",
    )
    return _next_to_each_other(results, "codec", {code(spec): spec for spec in specs})


def search_four_bits(results):
    """Recall@10 and bytes at about 4 bits per number on the sentence embeddings."""
    names = {
        "`trellis-4`": "trellis-4",
        "`turboquant-4`": "turboquant-4",
        "EDEN4, FAISS": "RR,EDEN4",
        "`rabitq-4`": "rabitq-4",
        "RaBitQ4, FAISS": "RR,RaBitQ4/qb=8",
        "`int-4`": "int-4",
        "TurboQuant mse (paper)": "mse-4",
        "TurboQuant prod (paper)": "prod-4",
        "SQ4, FAISS": "SQ4",
    }
    return _next_to_each_other(results, "index", names)


def search_paper(results):
    """The experiment of TurboQuant's section 2.4: recall@1 at two widths of codes on four sets, by
    vectors x dimensions. PQ has 16 centroids for 2 numbers, or 256."""
    names = {
        "TurboQuant mse": "mse-{}",
        "TurboQuant prod": "prod-{}",
        "RaBitQ, FAISS": "RR,RaBitQ{}/qb=8",
        "`turboquant`": "turboquant-{}",
        "`trellis`": "trellis-{}",
    }
    sizes = [results.newest(FILE, {"data": data}) for data in ISOTROPIC]
    rows = []
    for bits, tail in ((2, "x4fs"), (4, "")):
        for name, index in names.items():
            of = {"index": index.format(bits)}
            lines = [results.maybe(FILE, {"data": data, **of}) for data in ISOTROPIC]
            rows.append([bits, name, *(_recall(line, "recall_1") for line in lines)])
        pq = [f"PQ{int(line['dim']) // 2}{tail}" for line in sizes]
        lines = [results.maybe(FILE, {"data": d, "index": x}) for d, x in zip(ISOTROPIC, pq)]
        rows.append([bits, "PQ, FAISS", *(_recall(line, "recall_1") for line in lines)])
    columns = [
        f"{code(data)}, {thousands(line.number('n'))} x {line['dim']}"
        for data, line in zip(ISOTROPIC, sizes)
    ]
    return table(["bits", "index", *columns], *rows)


def search_lists(results):
    """With 128 inverted lists: queries per second at recall 0.94 and 0.986, one CPU thread."""
    lists = {"index": like(".*(IVF|lists=)128.*")}
    lines = results.lines("search_ivf.csv", lists)
    rows = []
    for system, index, target in dict.fromkeys(
        (x["system"], x["index"], x["target"]) for x in lines
    ):
        of = {"system": system, "index": index, "target": target}
        line = results.newest("search_ivf.csv", of)
        name = code(index) if system.startswith("kvant") else f"FAISS {code(index)}"
        speed = f"{line.number('qps'):,.0f}"
        rows.append([name, line["bytes"], line["nprobe"], _recall(line), speed, line["machine"]])
    heading = ["index", "bytes", "lists read", "recall@10", "queries per second", "CPU"]
    return table(heading, *rows)


def search_recall(results):
    """Recall@10 at about 2 bits per number of the papers' codes, FAISS and kvant on five sets."""
    names = {
        "TurboQuant mse (paper)": "mse-2",
        "TurboQuant prod (paper)": "prod-2",
        "EDEN2, FAISS": "RR,EDEN2",
        "RaBitQ2, FAISS": like("(RR,)?RaBitQ2/qb=8"),
        "PQ, 16 centroids per 2 numbers": like(r"PQ\d+x4fs"),
        "`turboquant-2`": "turboquant-2",
        "`turboquant-2`, trained": "turboquant-2/train",
        "`turboquant-3:dims=` 5/8 of d": like(r"turboquant-3:dims=\d+"),
        "`trellis-2`": "trellis-2",
        "`trellis-2`, trained": "trellis-2/train",
        "`trellis-3:dims=` 5/8 of d": like(r"trellis-3:dims=\d+"),
    }
    rows = []
    for name, index in names.items():
        lines = [_two_bits(results, data, index) for data in SETS]
        rows.append([name, *map(_recall, lines)])
    return table(["index", *map(code, SETS)], *rows)


def _two_bits(results, data, index):
    """The newest line with about 2 bits per number; factors take up to 20 bytes more."""
    lines = results.lines(FILE, {"data": data, "index": index})
    fit = [line for line in lines if -16 <= line.number("bytes") - line.number("dim") / 4 <= 20]
    return results.take(fit) if fit else None


def search_speed(results):
    """Nanoseconds per vector and query, and vectors added per second, on one CPU thread."""
    rows = []
    for index in (
        "turboquant-4",
        "trellis-4",
        "turboquant-2",
        "trellis-2",
        "RR,RaBitQfs4",
        "RR,RaBitQfs2",
        "PQ192x4fs",
    ):
        measured = {"data": "minilm", "index": index, "ns_1": like(".+")}
        line = results.newest(FILE, measured)
        cells = [significant(line.number(c), 2) for c in ("ns_1", "ns_1_single")]
        added = f"{line.number('add_vectors_per_s'):,.0f}"
        name = code(index) if line["system"].startswith("kvant") else f"FAISS {code(index)}"
        rows.append([name, line["bytes"], _recall(line), *cells, added, line["machine"]])
    heading = [
        "index",
        "bytes",
        "recall@10",
        "ns, batch of 100",
        "ns, one query",
        "added per second",
    ]
    return table([*heading, "CPU"], *rows)


def search_gpu(results):
    """A million vectors on an H200: milliseconds per batch next to a bf16 product with top-k."""
    rows = []
    for data, dim in (("gauss200", 200), ("gauss1536", 1536)):
        for index in ("bf16 product, topk", "turboquant-8", "turboquant-4", "turboquant-2"):
            of = {"data": data, "index": index}
            lines = [results.newest("search_cuda.csv", {**of, "batch": n}) for n in (1, 1024)]
            name = "bf16 product and top-k" if index.startswith("bf16") else code(index)
            row = [dim, name, lines[0]["bytes"], _recall(lines[0])]
            for line in lines:
                row += [f"{line.number('ms'):.2f}", times(line.number("ratio_to_bf16"))]
            rows.append(row)
    heading = [
        "d",
        "index",
        "bytes",
        "recall@10",
        "1 query, ms",
        "times",
        "1024 queries, ms",
        "times",
    ]
    return table(heading, *rows)
