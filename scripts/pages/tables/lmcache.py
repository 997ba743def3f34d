"""LMCache: how much smaller chunks are, and how fast they are encoded and decoded."""

from text import table

CODECS = {
    "turboquant-4:center=first/turboquant-4": (
        "`turboquant-4:center=first`, `turboquant-4` (default)"
    ),
    "turboquant-4/turboquant-4": "`turboquant-4`",
    "int-4/int-4": "`int-4`",
    "balanced": "`balanced`",
}
SMALL, LARGE = "1x32x256x2048", "2x80x8192x1024"
PLACES = (
    ("cpu", "host", SMALL, "a CPU core"),
    ("cuda", "host", SMALL, "GPU, through the host"),
    ("cuda", "device", LARGE, "GPU alone, large chunks"),
)


def lmcache(results):
    """Size against bfloat16 and GB of bfloat16 per second, encoding and decoding, by place."""
    rows = []
    for codecs, name in CODECS.items():
        for device, where, shape, place in PLACES:
            of = {
                "codecs": codecs,
                "device": device,
                "where": where,
                "shape": shape,
                "workers": "1",
            }
            lines = [results.maybe("lmcache.csv", {**of, "what": w}) for w in ("encode", "decode")]
            if all(lines):
                speeds = [f"{line.number('gb_per_s'):.3g}" for line in lines]
                row = [name, f"{lines[0].number('ratio'):.2f}", place, lines[0]["machine"]]
                rows.append([*row, *speeds])
    heading = ["`k`, `v`", "times smaller", "where", "machine", "encode, GB/s", "decode, GB/s"]
    return table(heading, *rows)
