"""Attention of one layer: prompts on a GPU next to rivals, and CPU kernels next to ggml's."""

from results import one_of
from text import code, table


def _microseconds(results, file, codec):
    shape = {"batch": "1", "heads": "32", "kv_heads": "8", "head_dim": "128", "tokens": "32768"}
    wanted = {**shape, "query tokens": "2048", "shared KB": "", "codec": codec}
    return f"{results.newest(file, wanted).number('us'):.0f}"


def kernel_prefill(results):
    """Microseconds of attention of 2048 query tokens over 32,768 tokens, one layer, H200."""
    rivals = {
        "cuDNN, bf16": "cudnn-bf16",
        "FlashAttention-3, bf16": "fa3-bf16 plain",
        "FlashAttention-3, fp8": "fa3-fp8 plain",
    }
    ours = ("int-4", "turboquant-4", "trellis-4", "octopus-4", "hqmq-s96r4")
    rows = [[name, _microseconds(results, "cuda_fa3.csv", codec)] for name, codec in rivals.items()]
    rows += [[code(codec), _microseconds(results, "cuda_prefill.csv", codec)] for codec in ours]
    return table(["cache", "us per layer, H200"], *rows)


def kernel_cpu(results):
    """Attention of one layer on two CPU threads: times faster than ggml's f16 in the same run."""
    shapes = {"4096": "1", "32768": "1", "131072": "1"}
    specs = [
        ("ggml", "q8_0"),
        ("ggml", "q4_0"),
        *(
            ("kvant", spec)
            for spec in (
                "int-4",
                "turboquant-4",
                "trellis-4",
                "trellis-3",
                "trellis-2",
                "octopus-4",
                "hqmq-s96r4",
            )
        ),
    ]
    rows = []
    for library, spec in specs:
        row = [f"{library} {code(spec)}"]
        for tokens, queries in shapes.items():
            wanted = {
                "library": library,
                "k": spec,
                "v": spec,
                "head_dim": "128",
                "gqa": "4",
                "tokens": tokens,
                "queries": queries,
                "threads": "2",
                "level": one_of("", "avx512vnni"),
            }
            found = [
                line for line in results.lines("cpu_attention.csv", wanted) if line["times_f16"]
            ]
            row.append(f"{results.take(found).number('times_f16'):.1f}" if found else "")
        rows.append(row)
    return table(["times ggml's `f16`", *(f"{int(tokens):,} tokens" for tokens in shapes)], *rows)
