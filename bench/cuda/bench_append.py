#!/usr/bin/env python3
"""Times kvant's append and seal (K and V in one call) as a fraction of a copy's speed.

The copy is from device to device, in the same process. Bytes of kvant are the rows or fp16 pages
that are read and the pages that are written; bytes of the copy are all bytes that it reads and
writes."""

import argparse
import csv
import shlex
import sys

import torch

import kvant
from bench_attention import bench, codec_list, in_whole_blocks, machine, spec_for

# tokens, kv heads, head_dim
SHAPES = [(8192, 8, 128), (1, 8, 128), (64, 8, 128)]


def copy_bandwidth(flush, repeats):
    """Bytes per microsecond, read and written, of an elementwise kernel; a memcpy node of a graph
    is slower."""
    source = torch.randint(0, 1 << 30, (1 << 28,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 8 * source.numel() / bench(lambda: torch.bitwise_not(source, out=target), flush, repeats)


def bench_append(codec, shape, flush, repeats, to_open):
    tokens, kv_heads, head_dim = shape
    spec = spec_for(codec, head_dim)
    blocks = (tokens + 63) // 64
    n_blocks = blocks if tokens > 64 else tokens
    cache = kvant.PagedCache(spec, spec, kv_heads, head_dim, n_blocks, n_blocks, seed=1)
    k, v = (
        torch.randn(tokens, kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    at = torch.arange(tokens, device="cuda")
    # A prompt's tokens are neighbours. A decode step's tokens belong to different sequences, and so
    # to different blocks.
    slots = (
        torch.randperm(blocks, device="cuda")[at // 64] * 64 + at % 64
        if tokens > 64
        else at * 64 + 17
    )
    row_bytes = k.numel() * k.element_size()
    size = 4 * row_bytes if to_open else 2 * row_bytes + tokens * cache.block_bytes / 64
    return bench(lambda: cache.append(k, v, slots, to_open=to_open), flush, repeats), size


def bench_seal(codec, shape, flush, repeats):
    tokens, kv_heads, head_dim = shape
    spec = spec_for(codec, head_dim)
    blocks = (tokens + 63) // 64
    cache = kvant.PagedCache(spec, spec, kv_heads, head_dim, blocks, blocks, seed=1)
    k, v = (
        torch.randn(blocks * 64, kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    cache.append(k, v, torch.arange(blocks * 64, device="cuda"), to_open=True)
    opened, sealed = (torch.randperm(blocks, device="cuda").to(torch.int32) for _ in range(2))
    size = 2 * k.numel() * k.element_size() + blocks * cache.block_bytes
    return bench(lambda: cache.seal(opened, sealed), flush, repeats), size


def runs(codecs):
    """(operation, codec, shape, function) of all rows."""
    for shape in SHAPES:
        for codec in codecs:
            spec = spec_for(codec, shape[2])
            if not in_whole_blocks(spec, spec, shape[2]):
                yield "append", codec, shape, lambda *a: bench_append(*a, False)
        yield "append to open pages", "turboquant-4", shape, lambda *a: bench_append(*a, True)
    for shape in SHAPES[:2]:  # a prompt, and one block
        for codec in codecs:
            yield "seal", codec, shape, bench_seal


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--codecs",
        default="int-4,bdr-4,turboquant-4,turboquant-3,turboquant-2,int-2,int-8,octopus-4,"
        "octopus-2,hqmq-s96r4,hqmq-s192r6,"
        "trellis-4,trellis-3,trellis-2,kivi-2,innerq-small",
        help="codecs whose tokens share numbers are only sealed",
    )
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--csv")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--compiler", default="unknown")
    args = parser.parse_args()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    copy = copy_bandwidth(flush, args.repeats)
    print(f"copy {copy / 1e6:.2f} TB/s")
    rows = []
    for operation, codec, shape, run in runs(codec_list(args.codecs)):
        try:
            us, size = run(codec, shape, flush, args.repeats)
        except kvant.Error as error:
            print(f"{operation} {codec}: {error}", file=sys.stderr)
            continue
        print(
            f"{operation} {'x'.join(map(str, shape))} {codec}: {us:.1f} us, {size / us / copy:.0%} "
            "of copy",
            flush=True,
        )
        rows.append(
            [
                *machine(),
                args.compiler,
                args.commit,
                shlex.join(["bench_append.py", *sys.argv[1:]]),
                operation,
                *shape,
                codec,
                f"{us:.2f}",
                f"{size / us / 1e3:.0f}",
                f"{size / us / copy:.3f}",
            ]
        )
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(
                [
                    "machine",
                    "driver",
                    "compiler",
                    "commit",
                    "command",
                    "operation",
                    "tokens",
                    "kv_heads",
                    "head_dim",
                    "codec",
                    "us",
                    "GB/s",
                    "fraction of copy",
                ]
            )
            writer.writerows(rows)


if __name__ == "__main__":
    main()
