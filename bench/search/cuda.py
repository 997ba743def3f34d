#!/usr/bin/env python3
"""Searches of all vectors on a GPU: kvant's codes, and a bf16 matrix product with torch.topk.

    python bench/search/cuda.py --commit ID --csv bench/results/search_cuda.csv
    python bench/search/cuda.py --data gauss1536 --n 1000000 --codecs turboquant-4 --batches 1,1000

Sets: gauss200, gauss1536 and gauss3072 are --n isotropic directions, made here; any other name is a
set of data.py. In both cases queries come from host memory and results go there. The two alternate
within a batch; a time is the median of --rounds. PyTorch takes the base whole or in pieces,
whichever is faster at that batch. `recall_10`: share of the 10 found vectors whose exact product is
no smaller than the 10th largest (fp32 candidates, fp64 products)."""

import argparse
import csv
import pathlib
import statistics
import subprocess
import sys
import time

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "integrations" / "python"))
import kvant  # noqa: E402

K, QUERIES, CHUNK = 10, 1024, 50_000
PIECES = (1 << 30, 1 << 17)  # vectors per product of PyTorch


def unit(rows):
    return rows / rows.norm(dim=1, keepdim=True)


def chunks(name, n):
    """The base as float32 tensors on the GPU."""
    if name.startswith("gauss"):
        random = torch.Generator(device="cuda").manual_seed(7)
        for first in range(0, n, CHUNK):
            yield unit(
                torch.randn(min(CHUNK, n - first), int(name[5:]), generator=random, device="cuda")
            )
    else:
        import data

        base = data.load(name, "base")
        for first in range(0, len(base), CHUNK):
            yield torch.from_numpy(base[first : first + CHUNK]).cuda()


def queries_of(name):
    if name.startswith("gauss"):
        random = torch.Generator(device="cuda").manual_seed(8)
        return unit(torch.randn(QUERIES, int(name[5:]), generator=random, device="cuda"))
    import data

    return torch.from_numpy(data.load(name, "query")).cuda()


class Set:
    """bf16 rows on the GPU, an index per codec, and the exact 10th product of each query."""

    def __init__(self, name, n, codecs):
        self.name, self.queries = name, queries_of(name)
        self.rows, self.indexes, self.added, best = [], {}, {}, None
        for chunk in chunks(name, n):
            host = chunk.cpu().numpy()
            for codec in codecs:
                index = self.indexes.setdefault(
                    codec, kvant.Index(chunk.shape[1], spec=codec, device="cuda")
                )
                start = time.perf_counter()
                index.add(host)
                self.added[codec] = self.added.get(codec, 0) + time.perf_counter() - start
            self.rows.append(chunk.bfloat16())
            best = self.better(best, chunk)
        self.rows, self.tenth = torch.cat(self.rows), best
        self.host = self.queries.cpu().numpy()

    def better(self, best, chunk):
        """The K largest products so far, in fp64: candidates are 2 K of fp32."""
        near = (self.queries @ chunk.T).topk(2 * K).indices
        exact = torch.stack(
            [chunk[ids].double() @ q.double() for q, ids in zip(self.queries, near)]
        )
        return exact.topk(K).values if best is None else torch.cat([best, exact], 1).topk(K).values

    def recall(self, name, n, found):
        hits, first = 0, 0
        found = torch.from_numpy(found).cuda()
        for chunk in chunks(name, n):
            for at in range(0, len(found), 64):
                ids, q = found[at : at + 64] - first, self.queries[at : at + 64]
                here = (ids >= 0) & (ids < len(chunk))
                exact = (chunk[ids.clamp(0, len(chunk) - 1)].double() * q.double()[:, None]).sum(2)
                hits += int((here & (exact >= self.tenth[at : at + 64, -1:] - 1e-9)).sum())
            first += len(chunk)
        return hits / found.numel()


def brute_force(rows, queries, piece):
    q = torch.from_numpy(queries).cuda().bfloat16()
    scores, ids = [], []
    for first in range(0, len(rows), piece):
        best = (q @ rows[first : first + piece].T).topk(K)
        scores.append(best.values)
        ids.append(best.indices + first)
    best = torch.cat(scores, 1).topk(K)
    return best.values.float().cpu().numpy(), torch.cat(ids, 1).gather(
        1, best.indices
    ).cpu().numpy()


def timed(call):
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def median_times(calls, rounds):
    times = [[] for _ in calls]
    for i in range(rounds + 1):
        for call, seconds in zip(calls, times):
            used = timed(call)
            if i > 0:  # the first is for allocations and cuBLAS's choice
                seconds.append(used)
    return [statistics.median(seconds) for seconds in times]


def measure(s, codecs, batch, rounds):
    """Rows of one batch: PyTorch first."""
    queries = s.host[:batch]
    pieces = [piece for piece in PIECES if piece < len(s.rows) or piece == PIECES[0]]
    calls = [lambda piece=piece: brute_force(s.rows, queries, piece) for piece in pieces]
    calls += [lambda codec=codec: s.indexes[codec].search(queries, K) for codec in codecs]
    seconds = median_times(calls, rounds)
    rival = min(seconds[: len(pieces)])
    n, d = s.rows.shape
    for name, used in [("bf16 product, topk", rival), *zip(codecs, seconds[len(pieces) :])]:
        bytes_per_vector = s.indexes[name].info.bytes_per_vector if name in s.indexes else 2 * d
        yield {
            "data": s.name,
            "n": n,
            "dim": d,
            "index": name,
            "bytes": bytes_per_vector,
            "batch": batch,
            "ms": round(used * 1e3, 4),
            "queries_per_s": round(batch / used),
            "ps_per_vector": round(used * 1e12 / n / batch, 3),
            "GB/s": round(bytes_per_vector * n / used / 1e9),
            "ratio_to_bf16": round(rival / used, 2),
        }


def found_by(s, name):
    if name in s.indexes:
        return s.indexes[name].search(s.host, K)[1]
    return np.concatenate(
        [brute_force(s.rows, s.host[i : i + 256], PIECES[0])[1] for i in range(0, len(s.host), 256)]
    )


def first_line(*command):
    try:
        return (
            subprocess.run(command, capture_output=True, text=True, check=True)
            .stdout.splitlines()[0]
            .strip()
        )
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="gauss200,gauss1536,gauss3072")
    parser.add_argument(
        "--n", type=int, default=1_000_000, help="vectors of gauss sets; %(default)s"
    )
    parser.add_argument("--codecs", default="turboquant-4,turboquant-2,turboquant-1")
    parser.add_argument("--batches", default="1,10,100,1024")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--commit", default="")
    parser.add_argument("--csv", help="where rows are appended; otherwise they are only printed")
    arguments = parser.parse_args()
    codecs, rows = arguments.codecs.split(","), []
    driver = first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    about = {
        "machine": torch.cuda.get_device_name(),
        "driver": driver,
        "pytorch": torch.__version__.split("+")[0],
        "commit": arguments.commit,
        "command": "cuda.py " + " ".join(sys.argv[1:]).split(" --commit")[0].split(" --csv")[0],
    }
    for name in arguments.data.split(","):
        s = Set(name, arguments.n, codecs)
        recalls = {
            index: round(s.recall(name, arguments.n, found_by(s, index)), 4)
            for index in ["bf16 product, topk", *codecs]
        }
        for batch in map(int, arguments.batches.split(",")):
            for row in measure(s, codecs, min(batch, len(s.host)), arguments.rounds):
                rows.append(about | row | {"recall_10": recalls[row["index"]]})
                print(
                    *(
                        row[key]
                        for key in (
                            "data",
                            "index",
                            "batch",
                            "ms",
                            "ps_per_vector",
                            "GB/s",
                            "ratio_to_bf16",
                        )
                    ),
                    recalls[row["index"]],
                    flush=True,
                )
        print(
            name,
            "added per s:",
            {codec: round(len(s.rows) / seconds) for codec, seconds in s.added.items()},
            flush=True,
        )
        del s
        torch.cuda.empty_cache()
    if arguments.csv:
        path = pathlib.Path(arguments.csv)
        with open(path, "a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
            if path.stat().st_size == 0:
                writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
