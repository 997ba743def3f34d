#!/usr/bin/env python3
"""How fast the serde of kvant[lmcache] is, and how many bytes it stores: lines of
bench/results/lmcache.csv. LMCache itself is not needed.

    bench/bench_lmcache.py --workers 1 8 --append bench/results/lmcache.csv            # on the CPU
    bench/bench_lmcache.py --device cuda --append bench/results/lmcache.csv

gb_per_s counts raw bytes (bfloat16) in the best of several runs. One worker on the CPU is timed by
its thread's clock, which counts seconds of a core and does not depend on other programs. `where` of
a GPU: "host" goes from pinned memory to pinned memory as LMCache's server does; "device" leaves
rows and pages on the GPU, without records and checksums, as in LMCache's published figures."""

import csv
import functools
import itertools
import os
import pathlib
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "integrations" / "python"), str(ROOT / "bench")]

import record  # noqa: E402
import torch  # noqa: E402

from kvant.lmcache import options  # noqa: E402
from kvant.lmcache.serde import Serde  # noqa: E402

CODECS = (
    "turboquant-4:center=first/turboquant-4",
    "turboquant-4/turboquant-4",
    "int-4/int-4",
    "balanced",
)
CHUNK = (1, 32, 256, 2 * 8 * 128)  # 256 tokens of Llama 3.1 8B, fused
PUBLISHED = (2, 80, 8192, 8 * 128)  # github.com/LMCache/LMCache/pull/4924: 70 and 66 GB/s on an L20
KEY = types.SimpleNamespace(
    model_name="model", kv_rank=1 << 24, object_group_id=0, cache_salt="", chunk_hash=bytes(32)
)
COLUMNS = (
    "machine",
    "device",
    "where",
    "codecs",
    "shape",
    "workers",
    "what",
    "gb_per_s",
    "ratio",
    "commit",
)


def words(codecs):
    return dict(zip("kv", codecs.split("/"))) if "/" in codecs else {"preset": codecs}


def best(call, seconds, clock=time.perf_counter):
    """The shortest of the calls that fit into this number of seconds."""
    call()
    found, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or found == float("inf"):
        start = clock()
        call()
        found = min(found, clock() - start)
    return found


def buffer(n, pinned=False):
    data = torch.zeros(n + 64, dtype=torch.uint8, pin_memory=pinned).numpy()
    return data[-data.ctypes.data % 64 :][:n]


def rows_like(shape, device="cpu", pinned=False):
    generator = torch.Generator(device).manual_seed(1)
    made = torch.randn(
        shape,
        generator=generator,
        device=device,
        dtype=torch.float32 if device == "cpu" else torch.bfloat16,
    )
    made = made.to(torch.bfloat16)
    return made.pin_memory() if pinned else made


def on_host(codecs, shape, workers, device, seconds):
    """From host memory to host memory; on a GPU `workers` objects at once."""
    pinned = device != "cpu"
    serde = Serde(
        options.read({"head_dim": 128, "device": device, "workers": workers} | words(codecs))
    )
    at_once = workers if pinned else 1
    x = [rows_like(shape, pinned=pinned) for _ in range(at_once)]
    y = [torch.empty_like(one, pin_memory=pinned) for one in x]
    size = serde.size([x[0].shape], [x[0].dtype])
    data = [buffer(size, pinned) for _ in x]
    pool = ThreadPoolExecutor(at_once)

    def both(call):
        return lambda: list(pool.map(call, range(at_once)))

    def encode(i):
        serde.encode([x[i]], data[i], KEY)

    def decode(i):
        serde.decode(data[i], [y[i]], KEY)

    raw = x[0].nbytes * at_once
    clock = time.perf_counter if workers > 1 or pinned else time.thread_time
    try:
        for what, call in (("encode", encode), ("decode", decode)):
            run = both(call) if at_once > 1 else functools.partial(call, 0)
            yield what, raw / best(run, seconds, clock) / 1e9, x[0].nbytes / size
    finally:
        pool.shutdown()
        serde.close()


def on_device(codecs, shape, device, seconds):
    serde = Serde(options.read({"head_dim": 128, "device": device} | words(codecs)))
    gpu, x = serde._gpu, rows_like(shape, device)
    stored = serde._stored([x.shape], [x.dtype])[0]
    if not gpu.takes(stored):
        raise SystemExit(f"the GPU does not take {codecs}")
    pages, own, _ = gpu.to_pages(x, stored)
    y = torch.empty_like(x)

    def encode():
        gpu.to_pages(x, stored)
        torch.cuda.synchronize()

    def decode():
        gpu.from_pages(pages, own, stored, y)
        torch.cuda.synchronize()

    for what, call in (("encode", encode), ("decode", decode)):
        yield what, x.nbytes / best(call, seconds) / 1e9, x.nbytes / stored.size
    serde.close()


def measured(arguments):
    where = [("host", CHUNK)]
    if arguments.device != "cpu":
        where += [("device", CHUNK), ("device", PUBLISHED)]
    for codecs, (place, shape) in itertools.product(arguments.codecs, where):
        for workers in arguments.workers if place == "host" else [1]:
            rest = arguments.device, arguments.seconds
            run = (
                on_device(codecs, shape, *rest)
                if place == "device"
                else on_host(codecs, shape, workers, *rest)
            )
            for what, speed, ratio in run:
                yield (
                    place,
                    codecs,
                    "x".join(map(str, shape)),
                    workers,
                    what,
                    f"{speed:.3g}",
                    f"{ratio:.3f}",
                )


def main():
    parser = record.options_of(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1], help="threads; on a GPU objects at once"
    )
    parser.add_argument("--codecs", nargs="+", default=CODECS, help="a preset, or specs K/V")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each figure")
    parser.add_argument("--append", type=pathlib.Path, help="a CSV file")
    parser.add_argument("--commit", default=os.environ.get("KVANT_COMMIT") or record.commit())
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cuda = arguments.device != "cpu"
    machine = torch.cuda.get_device_name() if cuda else record.machine()
    new = not (arguments.append and arguments.append.exists())
    out = arguments.append.open("a", newline="") if arguments.append else sys.stdout
    writer = csv.writer(out, lineterminator="\n")
    if new:
        writer.writerow(COLUMNS)
    for row in measured(arguments):
        writer.writerow((machine, arguments.device.split(":")[0], *row, arguments.commit))
        out.flush()


if __name__ == "__main__":
    main()
