"""Vector search: recall, speed and memory of kvant next to FAISS and the papers' codes."""

from results import like
from text import code, table

FILE = "search.csv"
SETS = ("minilm", "words", "power", "offset", "gauss200")
ISOTROPIC = ("gauss200", "gauss1536", "gauss3072", "words")


def _newest(results, data, index, **more):
    return results.maybe(FILE, {"data": data, "index": index, **more})


def _recall(line, column="recall_10"):
    return f"{line.number(column):.3f}" if line else ""


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
    rows = []
    for spec in specs:
        line = results.newest(FILE, {"data": "minilm", "index": spec})
        rows.append([code(spec), line["bytes"], _recall(line)])
    return table(["codec", "bytes per vector", "recall@10"], *rows)


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
    rows = []
    for name, index in names.items():
        line = results.newest(FILE, {"data": "minilm", "index": index})
        rows.append([name, line["bytes"], _recall(line)])
    return table(["index", "bytes per vector", "recall@10"], *rows)


def search_paper(results):
    """The experiment of TurboQuant's section 2.4: recall@1 at 2 and at 4 bits on four sets."""
    names = {
        "TurboQuant mse": "mse-{}",
        "TurboQuant prod": "prod-{}",
        "RaBitQ, FAISS": "RR,RaBitQ{}/qb=8",
        "`turboquant`": "turboquant-{}",
        "`trellis`": "trellis-{}",
    }
    rows = []
    for bits in (2, 4):
        for name, index in names.items():
            lines = [_newest(results, data, index.format(bits)) for data in ISOTROPIC]
            rows.append([bits, name, *(_recall(line, "recall_1") for line in lines)])
    return table(["bits", "index", *map(code, ISOTROPIC)], *rows)


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
