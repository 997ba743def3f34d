"""Codecs on rows of normal numbers: distortion next to the bound, and the time to encode a row."""

from text import code, significant, table, times

FAMILIES = (
    "trellis-2",
    "turboquant-2",
    "trellis-3",
    "turboquant-3",
    "trellis-4",
    "turboquant-4",
    "turboquant-5:scale=norm",
    "int-4",
    "bdr-4",
    "hqmq-s96r4",
    "hqmq-s170r4",
    "hqmq-s192r6",
    "octopus-2:scale=norm",
    "octopus-3:scale=norm",
    "octopus-4:scale=norm",
    "polar-4:scale=norm",
    "innerq-base",
    "kivi-2",
)


def _line(results, spec):
    return results.newest("codecs.csv", {"spec": spec, "head_dim": 128})


def codec_distortion(results):
    """Relative squared error D of codecs at head_dim 128 by true bits, and D over the bound."""
    lines = [(spec, _line(results, spec)) for spec in FAMILIES]
    lines.sort(key=lambda item: (item[1].number("bits"), item[1].number("rescaled")))
    rows = []
    for spec, line in lines:
        bits, error = line.number("bits"), line.number("rescaled")
        rows.append([code(spec), f"{bits:g}", significant(error), times(error / 4**-bits)])
    return table(["codec", "true bits", "D", "D / 4^-bits"], *rows)


def codec_trellis(results):
    """D of trellis and turboquant by nominal bits next to the bound 4^-b, scale left out."""
    rows = []
    for bits in (2, 3, 4):
        row = [bits, significant(4.0**-bits)]
        row += [
            significant(_line(results, f"{family}-{bits}").number("rescaled"))
            for family in ("trellis", "turboquant")
        ]
        rows.append(row)
    return table(["bits", "bound", "`trellis`", "`turboquant`"], *rows)


def codec_hqmq(results):
    """D of hqmq with the options of its paper and with kvant's defaults."""
    rows = []
    for spec in ("hqmq-s24r4", "hqmq-s96r4", "hqmq-s170r4", "hqmq-s192r6", "hqmq-s341r4"):
        lines = [_line(results, s) for s in (f"{spec}:book=random,scale=norm", spec)]
        cells = [significant(line.number("relative")) for line in lines]
        rows.append([code(spec), f"{lines[1].number('bits'):g}", *cells])
    return table(["codec", "true bits", "D, paper's options", "D, defaults"], *rows)


def codec_octopus(results):
    """D of octopus with one direction tried (its paper's Table 1) and with the default search."""
    rows = []
    for bits in (2, 3, 4, 5):
        lines = [
            _line(results, f"octopus-{bits}:{options}")
            for options in ("round=scalar,scale=norm", "scale=norm")
        ]
        cells = [significant(line.number("relative")) for line in lines]
        rows.append([code(f"octopus-{bits}"), f"{lines[1].number('bits'):g}", *cells])
    return table(["codec", "true bits", "D, `round=scalar`", "D, default"], *rows)


def codec_encode(results):
    """Microseconds to encode a row of keys on one CPU thread, and times f16."""
    keys = dict.fromkeys(
        (line["spec"], line["head_dim"]) for line in results.lines("encode.csv", {"role": "K"})
    )
    rows = []
    for spec, head_dim in sorted(keys, key=lambda key: (-int(key[1]), key[0])):
        line = results.newest("encode.csv", {"spec": spec, "head_dim": head_dim, "role": "K"})
        if spec != "f16":
            cells = [
                significant(line.number("microseconds"), 2),
                f"{line.number('ratio_to_f16'):.0f}",
            ]
            rows.append([code(spec), head_dim, *cells, line["level"]])
    return table(["keys", "head_dim", "us per row", "times f16", "CPU level"], *rows)
