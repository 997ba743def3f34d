#!/usr/bin/env python3
"""Vector search beside FAISS: recall, bytes and time per vector on one thread, in one run.

    pip install faiss-cpu
    bench/record.py --append bench/results/search.csv -- bench/search/compare.py minilm FOLDER --json
    bench/record.py --append bench/results/search.csv -- bench/search/compare.py gauss-1536 FOLDER --json

Sets: minilm (bench/search/embed.py), and three that are made here:
  gauss-D      isotropic normal numbers, D dimensions, 10,000 vectors, 200 queries: no structure to find
  decay-D      the same with a spectrum of 1 / k, rotated: few directions hold most of the length
  clusters-D   200 centres with a spectrum of 1 / sqrt(k), and vectors at half the distance around them, all of length 1

Metric: inner product. Time is processor time of the only thread, the least of five rounds, per vector and query; batch 100 and
batch 1. bytes: codes and factors. FAISS trains on all vectors, kvant only where dims= asks for it."""

import json
import pathlib
import sys
import time

import faiss
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "integrations" / "python"))

import kvant  # noqa: E402

ROUNDS, TRAIN = 5, 10000
FAISS = ["SQ8", "SQ4", "RR,SQtqmse4", "RR,EDEN4", "RR,RaBitQ4", "RR,RaBitQfs4", "RR,SQtqmse2", "RR,EDEN2", "RR,RaBitQ2", "RR,EDEN1",
         "RR,RaBitQfs", "PQ{half}x4fs"]
KVANT = ["turboquant-8", "turboquant-4", "turboquant-3", "turboquant-2", "turboquant-1"]
PROJECTED = [("turboquant-8", 2), ("turboquant-4", 2), ("turboquant-3", 1.5), ("turboquant-2", 2)]  # dims / this


def made(name):
    kind, dim = name.split("-")
    dim, rng = int(dim), np.random.default_rng(3)
    n, queries = 10000, 200
    x = rng.standard_normal((n + queries, dim), dtype=np.float32)
    if kind == "gauss":
        return x[:n], x[n:]
    turn = np.linalg.qr(rng.standard_normal((dim, dim)))[0].astype(np.float32)
    k = np.arange(1, dim + 1, dtype=np.float32)
    if kind == "decay":
        x = (x / np.sqrt(k)) @ turn
        return x[:n], x[n:]
    centres = rng.standard_normal((200, dim), dtype=np.float32)
    x = ((centres[rng.integers(0, 200, n + queries)] + x / 2) / np.sqrt(np.sqrt(k))) @ turn
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x[:n], x[n:]


def load(name, folder):
    if name != "minilm":
        return made(name)
    return tuple(np.load(pathlib.Path(folder) / f"minilm.{part}.npy") for part in ("base", "query"))


def seconds(call):
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.process_time()
        result = call()
        best = min(best, time.process_time() - start)
    return best, result


def timed(search, queries, batch):
    """Seconds per query, and the ids found."""
    total, ids = 0.0, []
    for at in range(0, len(queries), batch):
        spent, found = seconds(lambda: search(queries[at:at + batch]))
        total, ids = total + spent, [*ids, found]
    return total / len(queries), np.concatenate(ids)


def recall(exact, queries, base, ids, k):
    """Ids as near as the k-th nearest count: ties do."""
    least = np.sort(exact, axis=1)[:, -k] - 1e-6
    return float(np.mean(np.take_along_axis(exact, ids[:, :k], 1) >= least[:, None]))


def row(name, system, codec, base, queries, exact, bytes_per_vector, built, search):
    batch, ids = timed(search, queries, 100)
    single, _ = timed(search, queries[:50], 1)
    return {"set": name, "vectors": len(base), "dim": base.shape[1], "queries": len(queries), "system": system, "codec": codec,
            "bytes_per_vector": bytes_per_vector, **{f"recall{k}": round(recall(exact, queries, base, ids, k), 4) for k in (1, 10, 100)},
            "ns_batch100": round(batch / len(base) * 1e9, 2), "ns_batch1": round(single / len(base) * 1e9, 2), "build_s": round(built, 3)}


def of_kvant(name, spec, base, queries, exact):
    start = time.process_time()
    index = kvant.Index(base.shape[1], "ip", spec)
    if "dims=" in spec:
        index.train(base[:TRAIN])
    index.add(base, n_threads=1)
    built = time.process_time() - start
    return row(name, f"kvant {kvant.version()}", spec, base, queries, exact, index.info.bytes_per_vector, built,
               lambda q: index.search(q, 100, 1)[1])


def of_faiss(name, factory, base, queries, exact):
    start = time.process_time()
    index = faiss.index_factory(base.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    index.train(base)
    index.add(base)
    built = time.process_time() - start
    return row(name, f"faiss {faiss.__version__}", factory, base, queries, exact, index.sa_code_size(), built,
               lambda q: index.search(q, 100)[1])


def main():
    name, folder = sys.argv[1:3]
    faiss.omp_set_num_threads(1)
    base, queries = load(name, folder)
    exact, dim = queries @ base.T, base.shape[1]
    rows = [of_kvant(name, spec, base, queries, exact) for spec in KVANT]
    rows += [of_kvant(name, f"{spec}:dims={int(dim / by) // 16 * 16}", base, queries, exact) for spec, by in PROJECTED]
    for factory in FAISS:
        print(name, factory, file=sys.stderr, flush=True)
        rows.append(of_faiss(name, factory.format(half=dim // 2), base, queries, exact))
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
