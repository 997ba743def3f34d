"""kvant search: nearest-neighbour search on compressed vectors, from files of vectors.

The index is kvant.Index, and kvant.read_vectors reads the files. `eval` compares what an index
finds with an exact search by NumPy."""

import time

import numpy as np

import kvant
from kvant.index import DEVICES, METRICS

from . import benchmarks, cli
from .table import Column

USUAL = "turboquant-4"
STEP = 8192  # vectors that are added before Ctrl-C counts
TRAIN = 10000
MOST_SPECS, MOST_QUERIES, MOST_DIM = 16, 100000, 8192
ROUNDS = 5
NO_ID = 2**64 - 1
# A third of a second for the checksum. A search with lists may read a small part of a larger file.
VERIFIED_MIB = 256
SCORES = 1 << 25  # numbers of an exact search at a time, 128 MiB

COMMAND = cli.Command(
    name="search",
    usage="build VECTORS INDEX [options]\n       kvant search query INDEX QUERIES [options]\n"
    "       kvant search info INDEX [options]\n"
    "       kvant search eval VECTORS QUERIES [options]",
    about="""\
Nearest-neighbour search on compressed vectors. `build` writes an index, `query` prints the
neighbours of each query, `eval` measures recall against an exact search, bytes and time per
vector, `info` describes an index. Needs NumPy.""",
    options=cli.options("""\
  -c, --codec SPEC        turboquant-B with 1 to 8 bits per dimension (default turboquant-4),
                          trellis-B with 2 to 4 bits (smaller errors, longer to build), int-B or
                          rabitq-B. NAME:dims=N keeps the N principal dimensions, lists=N makes
                          N inverted lists, rows=int8 adds 8 bits per dimension for --rerank.
                          Repeat it for eval
  -m, --metric NAME       build, eval: ip (inner product, default), cosine or l2
      --device NAME       query, eval: cpu (default) or cuda, an NVIDIA GPU: the same results
      --allow FILE        query: find only vectors whose ids FILE has, one per line; - is stdin
  -k, --neighbors K       query, eval: neighbours per query (default 10)
      --probe N           query, eval: inverted lists per query, at most all (default 8)
      --centroids FILE    build, eval: centroids of lists= (default: k-means)
      --rerank N          query, eval: rank the N best again by rows=int8, or, in eval without
                          rows=int8, by the original vectors
      --train N           build, eval: learn the centre, and the tables of dims= and lists=, from
                          the first N vectors (default 10000 with dims= or lists=, else none)
      --batch N           eval: queries per search (default 100)
  -n, --queries N         query, eval: at most N queries (default 1000)
  -t, --threads N         threads (default: every CPU; eval: 1)
      --verify            query, info: read the whole file first and compare its checksum; query
                          does so by itself with files of up to 256 MiB
      --json              one JSON array of flat objects
"""),
    notes="""\
VECTORS and QUERIES are .npy, .fvecs, .bvecs, .fbin, .u8bin, .i8bin, .f16bin or .hdf5 files. A
vector's id is its place in the file.

examples:
  kvant search build base.npy base.kvidx
  kvant search query base.kvidx queries.npy -k 10
  kvant search eval base.npy queries.npy -c turboquant-4 -c turboquant-3:dims=256""",
)
FIELDS = {
    "metric": ("metric",),
    "device": ("device",),
    "allow": ("allow",),
    "neighbors": ("k", cli.whole, 1, 10000),
    "probe": ("probe", cli.whole, 1, 65536),
    "centroids": ("centroids",),
    "rerank": ("rerank", cli.whole, 1, 1000000),
    "train": ("train", cli.whole, 1, 10000000),
    "batch": ("batch", cli.whole, 1, MOST_QUERIES),
    "queries": ("queries", cli.whole, 1, MOST_QUERIES),
    "threads": ("threads", cli.whole, 1, 256),
    "verify": ("verify",),
    "json": ("json",),
}
# The actions that take an option; all take --json.
USES = {
    "codec": "build, eval",
    "metric": "build, eval",
    "train": "build, eval",
    "device": "query, eval",
    "neighbors": "query, eval",
    "probe": "query, eval",
    "rerank": "query, eval",
    "queries": "query, eval",
    "batch": "eval",
    "allow": "query",
    "centroids": "build, eval",
    "threads": "build, query, eval",
    "verify": "query, info",
}

INFO = [
    Column("codec", "codec"),
    Column("metric", "metric"),
    Column("vectors", "vectors", 0),
    Column("dim", "dim", 0),
    Column("bits", None, 0),
    Column("bytes_per_vector", "bytes/vector", 0),
    Column("id_bytes", "id bytes", 0),
    Column("centred", None, 0),
    Column("file_bytes", "MiB", 1, 1 / (1 << 20)),
]
ANSWERS = [
    Column("query", "query", 0),
    Column("rank", "rank", 0),
    Column("id", "id", 0),
    Column("score", "score", 4),
]
MEASURED = [
    Column("codec", "codec"),
    Column("metric", None),
    Column("vectors", None, 0),
    Column("dim", None, 0),
    Column("queries", None, 0),
    Column("batch", None, 0),
    Column("device", None),
    Column("threads", None, 0),
    Column("k", None, 0),
    Column("probe", None, 0),
    Column("rerank", None, 0),
    Column("recall", "recall", 4),
    Column("bytes_per_vector", "bytes/vector", 0),
    Column("ns_per_vector", "ns/vector", 2),
    Column("us_per_query", "us/query", 1),
    Column("build_s", "build s", 2),
]


class Settings:
    def __init__(self, action, given):
        self.specs, self.metric, self.device, self.allow, self.centroids = [], "ip", "cpu", None, ""
        self.k, self.probe, self.rerank, self.train = 10, 0, 0, None
        self.batch, self.queries, self.threads = 100, 1000, 1 if action == "eval" else None
        self.verify, self.json = False, False
        for name, value in given:
            if action not in USES.get(name, action):
                cli.fail(
                    f"search {action} takes no --{name}, which is for {USES[name]}", code=cli.USAGE
                )
            if not cli.accept(self, FIELDS, name, value):
                self.specs.append(value)
        if len(self.specs) > MOST_SPECS:
            cli.fail(f"search: more than {MOST_SPECS} codecs are given", code=cli.USAGE)
        if self.device not in DEVICES:
            cli.fail(f"search: --device must be cpu or cuda, not '{self.device}'", code=cli.USAGE)
        if self.metric not in METRICS:
            cli.fail(f"search: --metric must be ip, cosine or l2, not '{self.metric}'")


def read(path, most=None):
    rows = kvant.read_vectors(path, n=most)
    if not len(rows):
        cli.fail(f"{path}: it has no vectors")
    if not 1 <= rows.shape[1] <= MOST_DIM:
        cli.fail(
            f"{path}: the vectors have {rows.shape[1]} dimensions, but an index has 1 to {MOST_DIM}"
        )
    return rows


def same_dimensions(what, rows, dim):
    if rows.shape[1] != dim:
        cli.fail(f"search: {what} have {rows.shape[1]} dimensions, but vectors have {dim}")


def stop_if_interrupted(progress=None):
    if cli.interrupted():
        if progress:
            progress.end()
        raise cli.Leave(cli.INTERRUPTED)


def make_index(settings, spec, base):
    centroids = read(settings.centroids) if settings.centroids else None
    if centroids is not None:
        same_dimensions("centroids", centroids, base.shape[1])
    index = kvant.Index(
        base.shape[1], settings.metric, spec, device=settings.device, centroids=centroids
    )
    train = settings.train or (TRAIN if "dims=" in spec or "lists=" in spec else 0)
    if train:
        index.train(base[:train])
    progress = cli.Progress(len(base), settings.json)
    for first in range(0, len(base), STEP):
        stop_if_interrupted(progress)
        index.add(base[first : first + STEP], settings.threads)
        progress.add(min(STEP, len(base) - first), spec)
    progress.end()
    return index


def print_info(index, settings):
    told = index.info
    row = [told.spec, told.metric, told.n, told.dim, told.bits, told.bytes_per_vector]
    row += [told.id_bytes, told.has_center, told.file_bytes]
    benchmarks.show(INFO, [row], settings.json)


def build(settings, vectors, path):
    if len(settings.specs) > 1:
        cli.fail(f"search build: {len(settings.specs)} codecs are given, but an index has one")
    cli.check_can_write("search build", path)
    index = make_index(settings, *(settings.specs or [USUAL]), read(vectors))
    index.save(path)
    print_info(index, settings)


def info(settings, path):
    index = kvant.Index.view(path)
    if settings.verify:
        index.verify()
    print_info(index, settings)


def open_for_query(settings, path):
    """Verifies a file that is not too large, so that damage is not taken for an answer."""
    index = kvant.Index.view(path, settings.device)
    if settings.verify or index.info.file_bytes >> 20 < VERIFIED_MIB:
        index.verify()
    else:
        cli.complain(
            f"search: {path} is not verified, as it has more than {VERIFIED_MIB} MiB: "
            "--verify does it"
        )
    return index


def read_ids(path):
    """The ids of a file, one per line; blank lines are skipped."""
    with open(0 if path == "-" else path, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file]
    for number, line in enumerate(lines, 1):
        if line and not line.removeprefix("-").isdecimal():
            cli.fail(f"{path}, line {number}: '{line[:40]}' is not an id")
        if line and not 0 <= int(line) < NO_ID:
            cli.fail(f"{path}, line {number}: '{line[:40]}' is not from 0 to 2^64 - 2")
    ids = [int(line) for line in lines if line]
    return np.array([i for i in ids if i < 2**63], np.int64)  # an index of Python has no others


def search(settings, index, queries, **more):
    return index.search(
        queries,
        settings.k,
        settings.threads,
        rerank=settings.rerank,
        n_probe=settings.probe,
        **more,
    )


def query(settings, path, queries):
    allowed = read_ids(settings.allow) if settings.allow is not None else None
    index = open_for_query(settings, path)
    rows = read(queries, settings.queries)
    same_dimensions("queries", rows, index.dim)
    scores, ids = search(settings, index, rows, allowed=allowed)
    found = [
        [q, rank + 1, int(ids[q, rank]), float(scores[q, rank])]
        for q, rank in zip(*(axis.tolist() for axis in np.nonzero(ids >= 0)))
    ]
    benchmarks.show(ANSWERS, found, settings.json)


def nearest(settings, base, queries):
    """For each query the ids of the vectors that are at least as close as the k-th nearest: the k
    nearest and all ties."""
    squared = np.einsum("ij,ij->i", base, base)
    k, found = min(settings.k, len(base)), []
    step = max(1, SCORES // len(base))
    progress = cli.Progress(len(queries), settings.json)
    for first in range(0, len(queries), step):
        stop_if_interrupted(progress)
        closeness = queries[first : first + step] @ base.T
        if settings.metric == "l2":
            closeness -= squared / 2
        elif settings.metric == "cosine":
            closeness /= np.sqrt(np.maximum(squared, np.finfo(np.float32).tiny))
        for row in closeness:
            found.append(np.flatnonzero(row >= np.partition(row, -k)[-k]))
        progress.add(len(closeness), "exact search")
    progress.end()
    return found


def recall(found, ids, k):
    return sum(np.isin(row, near).sum() for row, near in zip(ids, found)) / (len(found) * k)


def least_seconds(settings, index, queries, originals):
    """The ids that are found, and the seconds of the shortest of some rounds."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        _, ids = search(settings, index, queries, originals=originals)
        seconds.append(time.perf_counter() - start)
    return ids, min(seconds)


def measure(settings, index, originals, queries):
    """The ids that are found, and the seconds for all queries: the sum of all batches. The time
    that Python takes for a call is measured with no queries, and subtracted."""
    _, idle = least_seconds(settings, index, queries[:0], originals)
    total, found = 0, []
    for first in range(0, len(queries), settings.batch):
        stop_if_interrupted()
        batch = queries[first : first + settings.batch]
        ids, seconds = least_seconds(settings, index, batch, originals)
        total += max(seconds - idle, 0)
        found.append(ids)
    return np.concatenate(found), total


def measured(settings, spec, base, queries, found):
    start = time.perf_counter()
    index = make_index(settings, spec, base)
    if settings.device == "cuda":
        index._on_gpu()
    built = time.perf_counter() - start
    originals = base if settings.rerank and "rows=" not in spec else None
    ids, seconds = measure(settings, index, originals, queries)
    n, dim = base.shape
    row = [spec, settings.metric, n, dim, len(queries), settings.batch, settings.device]
    row += [settings.threads, settings.k, settings.probe, settings.rerank]
    row += [recall(found, ids, min(settings.k, n)), index.info.bytes_per_vector]
    return [*row, seconds * 1e9 / len(queries) / n, seconds * 1e6 / len(queries), built]


def evaluate(settings, vectors, queries):
    base = np.ascontiguousarray(read(vectors))
    queries = np.ascontiguousarray(read(queries, settings.queries))
    same_dimensions("queries", queries, base.shape[1])
    found = nearest(settings, base, queries)
    rows = [measured(settings, spec, base, queries, found) for spec in settings.specs or [USUAL]]
    benchmarks.show(MEASURED, rows, settings.json)


ACTIONS = {"build": (build, 2), "query": (query, 2), "info": (info, 1), "eval": (evaluate, 2)}


def main(words):
    given, words = COMMAND.parse_with_words(words)
    if not words:
        cli.fail(
            "search: the first word must be build, query, info or eval",
            "kvant search --help describes them",
            code=cli.USAGE,
        )
    action, *files = words
    if action not in ACTIONS:
        cli.fail(
            f"search: unknown action '{action}'",
            *(f"did you mean '{name}'?" for name in cli.closest(action, ACTIONS)),
            "kvant search --help lists them",
            code=cli.USAGE,
        )
    run, n = ACTIONS[action]
    if len(files) != n:
        cli.fail(
            f"search {action} takes {n} file{'s' if n > 1 else ''}, not {len(files)}",
            "kvant search --help shows which",
            code=cli.USAGE,
        )
    settings = Settings(action, given)
    cli.catch_interrupt()
    try:
        run(settings, *files)
    except kvant.Error as error:
        name = next((file for file in files if str(error).startswith(f"index {file}")), None)
        cli.fail(f"{name}: {error.reason}" if name else f"search: {error.reason}")
    except (ValueError, ImportError) as error:
        cli.fail(f"{error}")
    return cli.OK
