"""The papers' codecs on three models, KLD by paper; their timings; effects on synthetic rows."""

import statistics

from caches import recipe_key
from results import Missing, has, starts
from text import code, divergence, significant, table

FILE = "quality_papers.csv"
MODELS = {"SmolLM2": "SmolLM2-135M", "Qwen2.5": "Qwen2.5-0.5B", "Gemma-3": "Gemma-3-270M"}
ROOMS = {"_med3_room.kvant": "by layer", "_med3_alike.kvant": "64 everywhere"}


def _name(k, v):
    """A pair of specs, or the settings file that stands for one."""
    for end, room in ROOMS.items():
        if k.endswith(end):
            as_published = ":book=random,scale=norm,med3,median=page"
            name = k.removesuffix(end)
            return f"{code(name + as_published * name.startswith('hqmq'))}, `slots=` {room}"
    return code(k) if k == v else f"{code(k)} / {code(v)}"


def _check_exact_part(model, lines):
    """Raises Missing when a column has figures of settings files and of specs. A cache with a
    settings file keeps its first and newest tokens as fp16 (settings.md), and a cache with specs
    does not, so their figures cannot be compared.
    """
    if len({bool(line["config"]) for line in lines}) > 1:
        raise Missing(f"{FILE}: one column has figures of specs and of settings files of {model}")


def _positions(model, lines):
    """How many positions the figures of a column come from. Figures of different positions cannot
    stand in one column.
    """
    counts = {int(line["to"]) - int(line["from"]) + 1 for line in lines}
    if len(counts) > 1:
        raise Missing(f"{FILE}: one column has figures of {counts} positions of {model}")
    return counts.pop()


def _by_model(results, groups, wanted, name=_name):
    """A row per pair of codecs, a column per model; empty cells were not measured."""
    found = [line for group in groups for line in results.lines(FILE, {"group": group})]
    rows, columns = [], {model: [] for model in MODELS}
    for k, v in wanted:
        lines = {
            model: [x for x in found if (x["k"], x["v"], x["model"]) == (k, v, model)]
            for model in MODELS
        }
        taken = {model: results.take(some) for model, some in lines.items() if some}
        if not taken:
            raise Missing(f"{FILE} has no line with k={k}, v={v} in {', '.join(groups)}")
        for model, line in taken.items():
            columns[model].append(line)
        bits = next(iter(taken.values())).number("bits")
        cells = [divergence(taken[m].number("kld_mean")) if m in taken else "" for m in MODELS]
        rows.append([name(k, v), f"{bits:.2f}", *cells])
    used = {i: model for i, model in enumerate(MODELS) if columns[model]}
    for model in used.values():
        _check_exact_part(model, columns[model])
    names = [
        f"KLD, {MODELS[model]}, {_positions(model, columns[model]):,} positions"
        for model in used.values()
    ]
    heading = ["keys / values", "true bits", *names]
    return table(heading, *([*row[:2], *(row[i + 2] for i in used)] for row in rows))


def papers_octopus(results):
    """OCTOPUS's recipe (outer layers and 32 recent tokens in fp16) with five codecs."""
    names = (
        "octopus-{}:scale=norm",
        "octopus-{}:scale=norm,qjl",
        "turboquant-{}:scale=norm",
        "polar-{}:scale=norm",
        "turboquant-{}:qjl",
    )
    wanted = [
        (f"{name.format(bits)},recent=32", f"int-{bits}:group=32,recent=32")
        for bits in (4, 3, 2)
        for name in names
    ]
    return _by_model(results, ["octopus"], wanted, lambda k, _: recipe_key(k))


def papers_turboquant(results):
    """TurboQuant as published (scale=norm), with sketches, and kvant's scale."""
    specs = (
        "turboquant-4:scale=norm",
        "turboquant-4:qjl,sketch=gaussian",
        "turboquant-3.5:scale=norm",
        "turboquant-3.5",
        "turboquant-3:scale=norm",
        "turboquant-2.5:scale=norm",
    )
    return _by_model(results, ["turboquant"], [(spec, spec) for spec in specs])


def papers_hqmq(results):
    """HQMQ as published next to integers: orders of channels, with and without Med3x."""
    as_published = ":book=random,scale=norm"
    names = [
        f"hqmq-{size}{as_published}" for size in ("s24r3", "s24r6", "s96r4", "s192r4", "s96r6")
    ]
    specs = [
        "int-3:sym",
        "int-4:sym",
        "naive-3",
        "naive-4",
        "naive-4:med=5",
        "naive-4:range=all",
        *names,
        *(f"hqmq-{size}{as_published},order=halves" for size in ("s24r3", "s96r4", "s192r4")),
        "addvq-k48r4:search=greedy,scale=norm,order=halves",
        "hqmq-s96r4:center=first,norm=first",
        "hqmq-s96r4:order=dealt,center=first,norm=first",
        f"hqmq-s96r4{as_published},med3,median=page",
        f"hqmq-s24r6{as_published},med3,median=page",
        f"hqmq-s96r6{as_published},med3,median=page",
        f"hqmq-s24r6{as_published},med=5,median=page",
        f"hqmq-s96r6{as_published},med=5,median=page",
    ]
    page = f"hqmq-s96r4{as_published},med3,median=page,slots="
    pairs = [*((spec, spec) for spec in specs), (f"{page}112", f"{page}16")]
    return _by_model(results, ["hqmq", "hqmq-med3", "orders"], pairs)


def papers_room(results):
    """Med3x with the same room for outliers in all layers, and with room by layer."""
    names = [name + end for name in ("naive-4", "hqmq-s96r4") for end in reversed(ROOMS)]
    return _by_model(results, ["hqmq-room"], [(name, name) for name in names])


def papers_seeds(results):
    """How much HQMQ's perplexity varies between five seeds: the coefficient of variation."""
    wanted = {"group": "hqmq-seeds", "model": "SmolLM2", "k": has("order=halves,seed=")}
    specs = dict.fromkeys(line["k"] for line in results.lines(FILE, wanted))
    ppl = [results.newest(FILE, {**wanted, "k": spec}).number("ppl") for spec in specs]
    if len(ppl) < 2:
        raise Missing(f"{FILE}: seeds of HQMQ in the papers' order")
    return f"{100 * statistics.stdev(ppl) / statistics.mean(ppl):.1f} %"


def papers_saw(results):
    """SAW-INT4: integers and block-diagonal rotations."""
    same = (
        "int-4",
        "bdr-4",
        "bdr-4:signs=seed",
        "bdr-4:block=16",
        "bdr-4:block=64",
    )
    return _by_model(results, ["bdr"], [*((s, s) for s in same), ("bdr-4", "int-4")])


def papers_kmeans(results):
    """SAW-INT4's k-means and Hessian basis, next to integers and rotations on the same text."""
    specs = ["int-4", "bdr-4", "hessian-4", "hessian-4:pool=layer"]
    specs += [f"kmeans-4:c={n}{block}" for block in ("", ",block=64") for n in (1, 16, 256, 2048)]
    return _by_model(results, ["kmeans"], [(spec, spec) for spec in specs])


def papers_innerq(results):
    """InnerQ, KIVI with sinks, and TurboQuant with the same windows."""
    windows = ":sink=64,recent=64"
    wanted = [
        (name + windows, name + windows)
        for name in ("innerq-base", "innerq-hybrid", "innerq-small", "kivi-2")
    ]
    wanted += [("turboquant-4:scale=norm,recent=128", "turboquant-3:scale=norm,recent=128")]
    return _by_model(results, ["innerq-windows"], wanted)


def papers_symmetric(results):
    """InnerQ's Table 7 on SmolLM2: symmetric and asymmetric groups of keys and values, by bits."""
    tail = ",sink=32,recent=96"
    keys = {
        "symmetric": f"int-3:group=32,sym,norm=first{tail}",
        "asymmetric": f"int-3:group=32,norm=first{tail}",
    }
    modes = {"symmetric": ",sym", "asymmetric": ""}
    rows = []
    for bits in (2, 3):
        for k_name, k in keys.items():
            for v_name, mode in modes.items():
                v = f"int-{bits}:axis=channel,group=32{mode}{tail}"
                wanted = {"group": "innerq-modes", "model": "SmolLM2", "k": k, "v": v}
                line = results.newest(FILE, wanted)
                cells = [f"{line.number('bits'):.2f}", divergence(line.number("kld_mean"))]
                rows.append([f"3, {k_name}", f"{bits}, {v_name}", *cells])
    rows.sort(key=lambda row: row[2])
    return table(["bits of keys, groups", "bits of values, groups", "true bits", "KLD"], *rows)


def papers_equal_bits(results):
    """Relative error of OCTOPUS, and of TurboQuant mixed from two widths to the same true bits."""
    rows = []
    for bits in (2, 3, 4):
        pair = []
        for what in (
            f"octopus-{bits}:scale=norm",
            f"turboquant-{bits}:scale=norm and turboquant-{bits + 1}:scale=norm",
        ):
            pair.append(
                results.newest("papers_findings.csv", {"finding": "true bits", "what": what})
            )
        figures = [significant(line.number("figure")) for line in pair]
        rows.append([f"octopus-{bits}", f"{pair[0].number('bits'):.2f}", *figures])
    rows = [[code(row[0]), *row[1:]] for row in rows]
    return table(
        ["codec", "true bits", "its D", "D of `turboquant` of two widths, mixed to these bits"],
        *rows,
    )


def papers_constant(results):
    """Relative error of codecs when rows have a constant part of 4 standard deviations."""
    rows = []
    for spec in (
        "int-4",
        "bdr-4",
        "turboquant-4",
        "octopus-4",
        "hqmq-s192r6",
        "trellis-4",
        "int-4:axis=channel,group=64",
    ):
        wanted = {"finding": "constant part", "what": spec}
        ends = ("none", "4 standard deviations", "the same, its mean subtracted")
        lines = [
            results.newest("papers_findings.csv", {**wanted, "where": f"constant part: {end}"})
            for end in ends
        ]
        rows.append([code(spec), *(significant(line.number("figure")) for line in lines)])
    return table(
        ["D", "no constant part", "constant part", "constant part, its mean subtracted"], *rows
    )


def papers_timing(results):
    """Decode attention of one layer: the paper's microseconds, and kvant's for the same codec."""
    shapes = {
        "(1, 28, 4, 128, 65536)": ("1", "28", "4", "128", "65536"),
        "(32, 64, 8, 128, 16384)": ("32", "64", "8", "128", "16384"),
    }
    first, second = shapes
    # The paper's table; its GPU; our shape; our codec; the printed microseconds.
    said = [
        ("OCTOPUS, Table 7", "H200", first, "octopus-4", 660),
        ("OCTOPUS, Table 7", "H200", first, "octopus-2", 520),
        ("OCTOPUS, Table 7, its TurboQuant", "H200", first, "turboquant-4", 370),
        ("OCTOPUS, Table 7, cuDNN", "H200", first, "cudnn-bf16", 60),
        ("SAW-INT4, Table 4, which has half of these heads", "H100", second, "int-4", 327),
        ("SAW-INT4, Table 4, which has half of these heads", "H100", second, "bdr-4", 323),
    ]
    rows = []
    for where, gpu, shape, codec, paper in said:
        columns = ("batch", "heads", "kv_heads", "head_dim", "tokens")
        wanted = {**dict(zip(columns, shapes[shape])), "codec": codec, "machine": starts("NVIDIA")}
        line = results.newest("cuda_attention.csv", wanted)
        rows.append([where, code(codec), shape, f"{paper} ({gpu})", f"{line.number('us'):.0f}"])
    return table(["where", "codec", "shape here", "paper, us", "here, us (H200)"], *rows)
