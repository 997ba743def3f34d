#!/usr/bin/env python3
"""Prints cpu_attention.csv as tables, attention on a CPU by shape, codec and level, and draws the
picture of docs/evidence/results.md when --svg names a file (needs matplotlib).

    bench/cpu_roofline.py bench/results/cpu_attention.csv --svg docs/figures/cpu_roofline.svg \\
        --ceiling "16-bit products=300"

A ceiling is the speed of a kernel alone with data in the nearest cache, in billions of
multiply-adds per second on all threads of the measurement: check_kernels --bench.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "scripts" / "pages"))
from results import Results  # noqa: E402
from text import table_of  # noqa: E402

ORDER = ["c", "avx2", "avx2vnni", "avx512", "avx512vnni", "avx512vbmi", "neon", "neondot"]
COLORS = [
    "#444444",
    "#8c6d31",
    "#bd9e39",
    "#1f77b4",
    "#17becf",
    "#2ca02c",
    "#d62728",
    "#9467bd",
    "#e377c2",
]


def name(row):
    return f"ggml {row['k']}" if row["library"] == "ggml" else row["k"]


def number(row, key):
    return float(row[key])


def products(row):
    """Multiply-adds of a call; of its causal part, a query sees half of the queries' own tokens."""
    queries, tokens = number(row, "queries"), number(row, "tokens")
    heads = number(row, "gqa") * number(row, "kv_heads")
    return 2 * heads * number(row, "head_dim") * queries * (tokens - (queries - 1) / 2)


def level_of(rows):
    """The level of the first shapes, which is the machine's best."""
    return next(row["level"] for row in rows if row["level"])


def best(rows):
    return [row for row in rows if row["level"] in ("", level_of(rows))]


def names(rows):
    return list(dict.fromkeys(name(row) for row in rows))


def cell(row):
    times = f", {number(row, 'times_f16'):.1f}x" if row["times_f16"] else ""
    return f"{number(row, 'microseconds'):.0f}{times}"


def shape_table(rows):
    cells = {}
    for row in rows:
        label = f"{row['head_dim']}, {row['gqa']}, {int(row['tokens']):,}"
        cells.setdefault(label, {}).setdefault(name(row), cell(row))
    return table_of("head_dim, GQA, tokens", names(rows), cells)


def codec_table(rows):
    cells = {}
    for row in sorted(rows, key=lambda row: number(row, "microseconds")):
        bits = (
            8
            * number(row, "bytes")
            / (2 * number(row, "kv_heads") * number(row, "head_dim") * number(row, "tokens"))
        )
        cells.setdefault(
            name(row),
            {
                "bits": f"{bits:.2f}",
                "us": f"{number(row, 'microseconds'):.0f}",
                "GB/s": f"{number(row, 'gbytes_per_second'):.2f}",
                "times f16": f"{number(row, 'times_f16'):.2f}",
                "of memory": f"{number(row, 'share_of_bandwidth'):.0%}",
            },
        )
    return table_of("cache", ["bits", "us", "GB/s", "times f16", "of memory"], cells)


def level_table(rows, tokens):
    """Codecs that were measured at several levels. The best level was measured in another run than
    all lower levels."""
    cells = {}
    for row in rows:
        if row["library"] == "kvant" and row["tokens"] == tokens:
            cells.setdefault(row["k"], {})[row["level"]] = cell(row)
    cells = {codec: row for codec, row in cells.items() if len(row) > 1}
    return table_of(
        "codec", sorted({level for row in cells.values() for level in row}, key=ORDER.index), cells
    )


def tables(rows, bandwidths, decode, prefill, usual):
    def is_usual(row):
        return (row["head_dim"], row["gqa"], row["queries"]) == ("128", "4", "1")

    yield (
        f"{rows[0]['machine']}, {rows[0]['date']}, commit {rows[-1]['commit']}, level "
        f"{level_of(rows)}; {rows[0]['threads']} "
        f"threads read memory at {bandwidths[0]:.1f} to {bandwidths[-1]:.1f} GB/s, each run of the "
        "bench measured it once."
    )
    yield "\nOne query token, microseconds and times faster than ggml's f16:\n"
    yield from shape_table(usual)
    yield "\n512 query tokens, causal:\n"
    yield from shape_table(prefill)
    yield "\nEvery cache, one query token, head_dim 128, GQA 4, 32768 tokens:\n"
    yield from codec_table([row for row in decode if is_usual(row) and row["tokens"] == "32768"])
    yield "\nCPU levels, the same shape:\n"
    yield from level_table([row for row in rows if is_usual(row)], "32768")


def draw(rows, bandwidth, ceilings, path):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvant"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    intensities = [products(row) / number(row, "bytes") for row in rows]
    rates = [products(row) / number(row, "microseconds") / 1e3 for row in rows]
    span = [min(intensities) / 1.5, max(intensities) * 1.5]
    roof = max([max(rates), *ceilings.values()])
    axes.plot([span[0], roof / bandwidth], [span[0] * bandwidth, roof], "k-", linewidth=1)
    axes.text(
        span[0] * 1.05,
        span[0] * bandwidth * 1.9,
        f"memory, {bandwidth:.1f} GB/s",
        fontsize=8,
        rotation=35,
    )
    for label, height in ceilings.items():
        axes.plot([height / bandwidth, span[1]], [height, height], "k--", linewidth=0.8)
        axes.text(span[1], height * 1.05, f"{label}, {height:.0f}", fontsize=8, ha="right")
    for color, codec in zip(COLORS, names(rows)):
        for marker, many, size in (("o", False, 28), ("^", True, 36)):
            points = [
                (x, y)
                for x, y, row in zip(intensities, rates, rows)
                if name(row) == codec and (number(row, "queries") > 8) == many
            ]
            if points:
                axes.scatter(
                    *zip(*points), s=size, color=color, marker=marker, label=None if many else codec
                )
    axes.set(
        xscale="log",
        yscale="log",
        xlim=span,
        xlabel="multiply-adds a byte of keys and values",
        ylabel="billions of multiply-adds a second",
    )
    axes.set_title(
        "Attention, head_dim 128: one query token (circles; GQA 1, 4, 7; 32768 tokens)\n"
        "and 512 (triangles; GQA 4; 4096 tokens)",
        fontsize=9,
    )
    axes.legend(fontsize=8, loc="center", bbox_to_anchor=(0.68, 0.25))
    axes.grid(True, which="major", linewidth=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=pathlib.Path, help="cpu_attention.csv")
    parser.add_argument("--svg", help="the picture's file")
    parser.add_argument(
        "--ceiling",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="a line of the picture",
    )
    arguments = parser.parse_args()
    rows = Results(arguments.csv.parent).lines(arguments.csv.name)
    bandwidths = sorted({number(row, "read_gbytes_per_second") for row in rows})
    decode = [row for row in best(rows) if row["queries"] == "1"]
    prefill = [row for row in best(rows) if row["queries"] != "1"]
    usual = [row for row in decode if name(row) in names(prefill)]
    text = "\n".join(tables(rows, bandwidths, decode, prefill, usual))
    print(text)
    if arguments.svg:
        drawn = [row for row in usual if (row["head_dim"], row["tokens"]) == ("128", "32768")]
        drawn += [row for row in prefill if row["head_dim"] == "128"]
        ceilings = {
            key: float(value) for key, value in (text.rsplit("=", 1) for text in arguments.ceiling)
        }
        draw(drawn, bandwidths[-1], ceilings, arguments.svg)


if __name__ == "__main__":
    main()
