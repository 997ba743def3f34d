#!/usr/bin/env python3
"""Recall, bytes and speed of vector indexes on the sets of bench/search/data.py: FAISS, kvant and
the papers' codes in NumPy.

    P=$(scripts/fetch.py faiss)
    bench/record.py bench/results/search.csv -- $P bench/search/compare.py --data minilm \\
        --speed --json
    $P bench/search/compare.py --data minilm 'faiss:RR,RaBitQ4/qb=8' kvant:turboquant-4 \\
        numpy:prod-2

An index is SYSTEM:NAME: faiss and a factory string, kvant and a codec's spec, numpy and
mse|scaled|prod|rabitq-BITS. "c" after BITS means centred rows, "cc" also centred queries. SYSTEM
alone means all of its lines in the tables, and a call without names measures all systems. Recall is
over 1000 queries, by inner product, and equal products count (data.py). With --speed, FAISS and
kvant alternate, batch by batch of 100 queries for 10 neighbours: ns per vector and query, the
median over batches of the best of --rounds."""

import argparse
import json
import os
import pathlib
import sys
import time

import numpy as np

import data

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "integrations" / "python"))

BATCH, K = 100, 10
PAPER_K = (1, 2, 4, 8, 16, 32, 64)


def tables(d):
    faiss = ["SQ4", "RR,SQtqmse4", "RR,SQtqmse2", "RR,EDEN4", "RR,EDEN2", "RR,EDEN1"]
    faiss += [f"RR,RaBitQ{bits}/qb=8" for bits in (4, 2, 1)] + [
        f"PQ{d // 2}x4fs",
        f"PQ{d // 4}x4fs",
    ]
    if d <= 200:  # 256 centroids per 2 or 4 numbers, as in the paper: minutes of training
        faiss += [f"PQ{d // 2}", f"PQ{d // 4}"]
    numpy = [
        form.format(bits)
        for bits in (4, 2, 1)
        for form in ("mse-{}", "scaled-{}", "scaled-{}cc", "rabitq-{}cc")
    ]
    numpy += ["scaled-2c", "scaled-3", "prod-4", "prod-3", "prod-2", "prod-1"]
    kvant = [f"turboquant-{bits}{train}" for bits in (4, 3, 2, 1) for train in ("", "/train")]
    kvant += [f"trellis-{bits}{train}" for bits in (4, 3, 2) for train in ("", "/train")]
    kvant += [
        "rabitq-4",
        "rabitq-2",
        "int-4",
        "octopus-3",
        "turboquant-4:qjl",
        "turboquant-2:qjl",
    ]
    if d <= 1024:  # about the size of 2-bit codes; minutes of training beyond
        faiss.append(f"PCAR{d * 5 // 8},EDEN3/l2")
        kvant += [f"turboquant-3:dims={d * 5 // 8}", f"trellis-3:dims={d * 5 // 8}"]
    return {"faiss": faiss, "numpy": numpy, "kvant": kvant}


def expand(names, d):
    """faiss, numpy and kvant stand for all that belongs to the table."""
    for name in names:
        yield from [f"{name}:{index}" for index in tables(d)[name]] if name in tables(d) else [name]


class Numpy:
    system = "numpy"

    def __init__(self, name, d):
        self.name, (self.form, bits) = name, name.split("-")
        self.center, self.bits = (None, "rows", "both")[bits.count("c")], int(bits.rstrip("c"))
        # mse: the length. scaled, rabitq: one more factor is part of it. prod: the length of the
        # rest, too.
        self.bytes = (
            -(-self.bits * d // 8) + 4 + 4 * (self.form == "prod") + 4 * (self.center == "both")
        )

    def train(self, rows, threads=1):
        pass

    def add(self, rows, threads=1):
        import reference

        make = reference.RaBitQ if self.form == "rabitq" else reference.TurboQuant
        extra = {} if self.form == "rabitq" else {"form": self.form}
        self.codes = make(rows, self.bits, center=self.center, **extra)

    def search(self, queries, k, threads=1):
        found = np.empty((len(queries), k), np.int64)
        for first in range(0, len(queries), BATCH):
            scores = -self.codes.products(queries[first : first + BATCH])
            near = np.argpartition(scores, k, axis=1)[:, :k]
            found[first : first + BATCH] = np.take_along_axis(
                near, np.argsort(np.take_along_axis(scores, near, 1), 1), 1
            )
        return found


class Kvant:
    """A spec. "/train" after it learns the centre from 20,000 rows; specs with dims= and lists=
    always train."""

    def __init__(self, name, d, **options):
        import kvant

        spec, _, train = name.partition("/")
        self.name = name
        self.system = f"kvant {kvant.version()}"
        self.learns = bool(train) or "dims=" in spec or "lists=" in spec
        self.index = kvant.Index(d, spec=spec, **options)

    def train(self, rows, threads=1):
        if self.learns:
            self.index.train(rows[:20_000])

    def add(self, rows, threads=1):
        self.index.add(rows, n_threads=threads)

    def search(self, queries, k, threads=1):
        return self.index.search(queries, k, n_threads=threads)[1]

    @property
    def bytes(self):
        return self.index.info.bytes_per_vector


def make(name, d):
    system, _, rest = name.partition(":")
    if system == "faiss":
        from rivals import Faiss

        return Faiss(rest, d)
    return {"kvant": Kvant, "numpy": Numpy}[system](rest, d)


def timed(call, *arguments):
    start = time.perf_counter()
    result = call(*arguments)
    return time.perf_counter() - start, result


def build(index, base, threads):
    index.trained, _ = timed(index.train, base, threads)
    index.added, _ = timed(index.add, base, threads)


def measure(indexes, queries, n, rounds, threads, batch):
    """ns per vector and query of each index. The indexes alternate, so that a change in the
    machine's speed meets them alike. An index that took two seconds is not measured again."""
    parts = [
        np.ascontiguousarray(queries[at : at + batch])
        for at in range(0, min(len(queries), 10 * batch), batch)
    ]
    best, used = np.full((len(indexes), len(parts)), np.inf), np.zeros(len(indexes))
    for _ in range(rounds):
        for j, part in enumerate(parts):
            for i in np.flatnonzero(used < 2):
                seconds, _ = timed(indexes[i].search, part, K, threads)
                best[i, j], used[i] = min(best[i, j], seconds), used[i] + seconds
    return [float(np.median(row[np.isfinite(row)])) * 1e9 / (n * batch) for row in best]


def row(name, index, base, query, truth, threads):
    found = index.search(query, 100, threads)
    out = {
        "data": name,
        "n": len(base),
        "dim": base.shape[1],
        "system": index.system,
        "index": index.name,
    }
    out["bytes"] = int(index.bytes)
    out |= {
        f"recall_{k}": round(float(data.recall(base, query, truth, found, k)), 4)
        for k in (1, 10, 100)
    }
    firsts = found == truth[:, :1]
    out |= {f"first_in_{k}": round(float(np.mean(firsts[:, :k].any(1))), 4) for k in PAPER_K}
    out["train_s"] = out["add_vectors_per_s"] = ""
    return out


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="SYSTEM[:NAME]")
    parser.add_argument("--data", required=True, choices=data.NAMES)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="'all' of the table; %(default)s",
    )
    parser.add_argument("--json", action="store_true", help="rows for bench/record.py")
    arguments = parser.parse_args()
    base, query, truth = (data.load(arguments.data, part) for part in ("base", "query", "truth"))
    indexes, rows = [], []
    for name in expand(arguments.names or tables(0), base.shape[1]):
        index = make(name, base.shape[1])
        build(index, base, 1 if arguments.speed else arguments.threads)
        rows.append(row(arguments.data, index, base, query, truth, arguments.threads))
        if arguments.speed:
            rows[-1] |= {
                "train_s": round(index.trained, 3),
                "add_vectors_per_s": round(len(base) / index.added),
            }
        if not arguments.speed or index.system == "numpy":
            index = None
        indexes.append(index)
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    fast = [i for i, index in enumerate(indexes) if index]
    for threads, batch, column in (
        (1, BATCH, "ns_1"),
        (1, 1, "ns_1_single"),
        (arguments.threads, BATCH, "ns_all"),
    ):
        found = (
            measure([indexes[i] for i in fast], query, len(base), arguments.rounds, threads, batch)
            if fast
            else []
        )
        for i in range(len(rows)):
            rows[i][column] = round(found[fast.index(i)], 2) if i in fast else ""
    print(json.dumps(rows) if arguments.json else "\n".join(map(str, rows)))


if __name__ == "__main__":
    main()
