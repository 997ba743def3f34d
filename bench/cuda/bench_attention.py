#!/usr/bin/env python3
"""Times decode attention of kvant and of rivals on the same work in one process.

The rivals are PyTorch's attention (flash and cuDNN, bf16, enable_gqa), FlashAttention-3 (bf16 and
fp8, with --fa3) and vLLM's Triton kernels (--vllm). Every figure is the median of replays of a CUDA
graph that holds only this call. The second-level cache is overwritten before each replay. kvant
reads its keys and values through a shuffled block table. Its time contains the rotation of queries
and outputs. Before it is timed, its output is compared with softmax in float32 over the decoded
pages.

    KVANT_LIBRARY=build/lib/libkvant.so PYTHONPATH=integrations/python \\
        bench/cuda/bench_attention.py --csv bench/results/cuda_attention.csv \\
        --commit $(git rev-parse --short HEAD) --fa3 $(bench/cuda/fa3.sh build-fa3)
"""

import argparse
import csv
import re
import shlex
import statistics
import subprocess
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa3
import kvant
import kvant.library
import vllm_turboquant

# batch, query heads, kv heads, head_dim, tokens
SHAPES = [
    (1, 28, 4, 128, 65536),
    (1, 32, 8, 128, 131072),
    (8, 32, 8, 128, 32768),
    (64, 32, 8, 128, 4096),
    (1, 32, 8, 128, 32768),
    (32, 64, 8, 128, 16384),
    (1, 16, 16, 64, 32760),
    (8, 16, 2, 256, 16384),
    (8, 32, 8, 96, 16384),
]
CODECS = [
    "int-4",
    "bdr-4",
    "turboquant-4",
    "turboquant-3",
    "turboquant-2",
    "int-2",
    "kivi-2",
    "innerq-small",
    "int-8",
    "octopus-4",
    "octopus-3",
    "octopus-2",
    "hqmq-s96r4",
    "hqmq-s192r6",
    "trellis-4",
    "trellis-3",
    "trellis-2",
    "turboquant-4/turboquant-3",
    "turboquant-4/int-4",
]


def bench(call, flush, repeats):
    """Median microseconds of a call that is replayed from a graph. Before each replay the
    second-level cache is filled with flush's bytes and not with the call's data. They are written,
    so the call also pays for writing them back to memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the call's inputs may not be complete yet
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    times = []
    with torch.cuda.stream(stream):
        for _ in range(repeats):
            flush.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def spec_for(codec, head_dim):
    return (
        codec + ":rotate=hadamard"
        if codec.startswith(("turboquant", "octopus", "trellis")) and head_dim & (head_dim - 1)
        else codec
    )


def codec_list(text):
    """Codecs with commas between them. A comma within a codec precedes no name of a codec."""
    return re.split(r",(?=[a-z]+-|b?f16)", text)


def in_whole_blocks(k, v, head_dim):
    """Whether tokens share numbers, so that blocks are only sealed as a whole."""
    return any(kvant.Codec(x, head_dim, role).block_tokens > 1 for x, role in ((k, "k"), (v, "v")))


def make_cache(codec, batch, kv_heads, head_dim, tokens, n_open=0):
    """A cache with random rows in shuffled blocks, and its block table. The last n_open blocks of a
    sequence are fp16."""
    pages = (tokens + 63) // 64
    keys, _, values = codec.partition("/")
    specs = spec_for(keys, head_dim), spec_for(values or keys, head_dim)
    groups = in_whole_blocks(*specs, head_dim)
    staging = pages if groups else 0  # fp16 blocks, through which codecs with groups are written
    cache = kvant.PagedCache(
        *specs, kv_heads, head_dim, batch * pages, staging + batch * n_open, seed=1
    )
    table = torch.randperm(batch * pages, device="cuda").to(torch.int32).view(batch, pages)
    for b in range(batch):
        rows = [
            torch.randn(tokens, kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        ]
        at = torch.arange(tokens, device="cuda")
        if groups:
            cache.append(rows[0], rows[1], at, to_open=True)
            cache.seal(torch.arange(pages, device="cuda", dtype=torch.int32), table[b])
        else:
            cache.append(rows[0], rows[1], table[b].long()[at // 64] * 64 + at % 64)
        if n_open:
            first = staging + b * n_open
            last = at[(pages - n_open) * 64 :]
            rows = [r[(pages - n_open) * 64 :] for r in rows]
            cache.append(rows[0], rows[1], first * 64 + last - (pages - n_open) * 64, to_open=True)
            table[b, pages - n_open :] = -1 - torch.arange(
                first, first + n_open, device="cuda", dtype=torch.int32
            )
    return cache, table


def relative_error(cache, table, q, out, tokens):
    """The error of sequence 0 and its first kv head, against float32 on the decoded pages."""
    group, n_queries = q.shape[2] // cache.n_kv_heads, q.shape[1]
    first = table[0, : (tokens + 63) // 64]
    sealed, opened = first[first >= 0], -1 - first[first < 0]

    def rows(role):
        pages = [cache.decode(role, sealed, torch.float32)]
        if opened.numel():
            pages.append(cache.decode(role, opened, torch.float32, is_open=True))
        return torch.cat(pages)[:tokens, 0]

    k, v = rows("k"), rows("v")
    scores = q[0, :, :group].float() @ k.T / cache.head_dim**0.5
    behind = (
        torch.arange(tokens, device=k.device)
        > torch.arange(tokens - n_queries, tokens, device=k.device)[:, None]
    )
    want = torch.softmax(scores.masked_fill(behind[:, None, :], -torch.inf), -1) @ v
    return ((out[0, :, :group].float() - want).norm() / want.norm()).item()


def ragged_lengths(batch, tokens):
    """Lengths between half of `tokens` and all of them, in an order that looks random but is always
    the same."""
    steps = (torch.arange(batch) * 37) % batch
    return (tokens - (steps * (tokens // 2)) // batch).to(device="cuda", dtype=torch.int32)


def bench_kvant(codec, shape, flush, repeats, n_open=0, ragged=False, n_queries=(1,)):
    """For each number of query tokens: microseconds, bytes, relative error."""
    batch, heads, kv_heads, head_dim, tokens = shape
    cache, table = make_cache(codec, batch, kv_heads, head_dim, tokens, n_open)
    return [bench_queries(cache, table, shape, n, flush, repeats, ragged) for n in n_queries]


def bench_queries(cache, table, shape, n_queries, flush, repeats, ragged):
    batch, heads, kv_heads, head_dim, tokens = shape
    q = torch.randn(batch, n_queries, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((batch,), tokens, device="cuda", dtype=torch.int32)
    if ragged:
        lengths = ragged_lengths(batch, tokens)
    out = torch.full_like(q, float("nan"))
    cache.attention(q, table, lengths, out=out)
    error = relative_error(cache, table, q, out, lengths[0].item())
    open_bytes = 4 * 64 * kv_heads * head_dim
    read = torch.arange(table.shape[1], device="cuda") * 64 < lengths[:, None]
    bytes_read = (read & (table >= 0)).sum().item() * cache.block_bytes
    bytes_read += (read & (table < 0)).sum().item() * open_bytes
    return (
        bench(lambda: cache.attention(q, table, lengths, out=out), flush, repeats),
        bytes_read,
        error,
    )


def bench_sdpa(backend, shape, flush, repeats, n_queries=1, as_heads=False):
    """Every query token sees all tokens, which is less work for a rival than causal masks among the
    last few. `as_heads`: query tokens are passed as further query heads of their kv head, as an
    engine could do."""
    batch, heads, kv_heads, head_dim, tokens = shape
    if as_heads:
        heads, n_queries = heads * n_queries, 1
    q = torch.randn(batch, heads, n_queries, head_dim, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(batch, kv_heads, tokens, head_dim, device="cuda", dtype=torch.bfloat16)
    v = torch.randn_like(k)

    def call():
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    try:
        return bench(call, flush, repeats), 2 * k.numel() * k.element_size()
    except RuntimeError as error:
        print(f"  {backend}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None, 2 * k.numel() * k.element_size()


def machine():
    drivers = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
    ).stdout.split()  # a line per GPU
    return torch.cuda.get_device_name(), drivers[0] if drivers else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes",
        default=",".join(map(str, range(len(SHAPES)))),
        help="numbers of the shapes to time",
    )
    parser.add_argument("--codecs", default=",".join(CODECS), help="K/V for two codecs in one call")
    parser.add_argument("--no-sdpa", action="store_true")
    parser.add_argument(
        "--fa3", help="libfa3_bench.so, which fa3.sh makes: FlashAttention-3 in bf16 and fp8"
    )
    parser.add_argument(
        "--vllm",
        help="a folder with vLLM's sources: its kernels of turboquant_4bit_nc, for one query token",
    )
    parser.add_argument(
        "--open", type=int, default=0, help="blocks at the end of every sequence that stay fp16"
    )
    parser.add_argument(
        "--ragged",
        action="store_true",
        help="lengths of kvant's calls between half of the tokens and all",
    )
    parser.add_argument(
        "--query-tokens", default="1", help="numbers of query tokens of each sequence, causal"
    )
    parser.add_argument(
        "--shared-kb",
        type=int,
        help="shared memory that kvant's blocks may use, as on smaller GPUs",
    )
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--csv", help="file to write the table to")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--compiler", default="unknown", help="what built the library")
    args = parser.parse_args()
    torch.manual_seed(1)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    gpu, driver = machine()
    if args.shared_kb:
        limit_shared_memory(args.shared_kb << 10)
    n_queries = [int(n) for n in args.query_tokens.split(",")]
    head = [
        gpu,
        driver,
        args.compiler,
        args.commit,
        shlex.join(["bench_attention.py", *sys.argv[1:]]),
    ]
    fa3_library = fa3.load(args.fa3) if args.fa3 else None
    fa3_types = fa3.check(fa3_library) if args.fa3 else []
    rows = []
    for shape in (SHAPES[int(i)] for i in args.shapes.split(",")):
        results = []  # name, query tokens, microseconds, bytes, relative error
        if not args.no_sdpa:
            results += rivals(shape, flush, args.repeats, n_queries)
        for n in n_queries:
            results += fa3.results(
                fa3_library, fa3_types, shape, n, lambda call: bench(call, flush, args.repeats)
            )
        if args.vllm and 1 in n_queries:
            results += vllm_turboquant.results(
                args.vllm, shape, lambda call: bench(call, flush, args.repeats)
            )
        for codec in codec_list(args.codecs):
            try:
                found = bench_kvant(
                    codec, shape, flush, args.repeats, args.open, args.ragged, n_queries
                )
            except kvant.Error as error:
                print(f"  {codec}: {error}", file=sys.stderr)
                continue
            results += [(codec, n, *one) for n, one in zip(n_queries, found)]
            torch.cuda.empty_cache()
        for n in n_queries:
            own = [r for r in results if r[1] == n and r[2]]
            rival = min((r[2] for r in own if r[0].startswith("cudnn")), default=None)
            print(
                "x".join(map(str, shape))
                + (f" ({n} query tokens): " if n > 1 else ": ")
                + "  ".join(
                    f"{name} {us:.1f}"
                    + (
                        f" ({size / us / 1e6:.2f} TB/s, err {error:.4f})"
                        if error is not None
                        else ""
                    )
                    for name, _, us, size, error in own
                ),
                flush=True,
            )
            for name, _, us, size, error in own:
                rows.append(
                    head
                    + [*shape, n, args.shared_kb or "", name, f"{us:.2f}", f"{size / us / 1e3:.0f}"]
                    + [
                        f"{rival / us:.2f}" if rival else "",
                        "" if error is None else f"{error:.5f}",
                    ]
                )
        if args.csv:
            write_rows(args.csv, rows)


def limit_shared_memory(size):
    kvant.library.library().kvant_cuda_limit_shared_memory(size)


def rivals(shape, flush, repeats, n_queries):
    cudnn, flash = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
    found = []
    for n in n_queries:
        for name, backend, as_heads in (
            ("cudnn-bf16", cudnn, False),
            ("flash-bf16", flash, False),
            ("cudnn-bf16 as heads", cudnn, True),
        ):
            if n > 1 or not as_heads:
                found.append(
                    (name, n, *bench_sdpa(backend, shape, flush, repeats, n, as_heads), None)
                )
    return found


def write_rows(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            "machine,driver,compiler,commit,command,batch,heads,kv_heads,head_dim,tokens,query "
            "tokens,shared KB,codec,us,"
            "GB/s,ratio to cuDNN,relative error".split(",")
        )
        writer.writerows(rows)


if __name__ == "__main__":
    main()
