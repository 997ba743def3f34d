"""The papers' claims that are not about KLD: embeddings, products, needles at few bits, the time of
InnerQ, and ideas that cross papers.
"""

from caches import recipe_key
from text import code, divergence, significant, table

from tables.claims import MODELS

FORMS = ("mse", "prod", "kvant's scale")
CPU_TOKENS = ("512", "2048", "8192", "32768")
GPU_TOKENS = (*CPU_TOKENS, "131072")
GROUPED = ("kivi-2", "innerq-base", "innerq-hybrid", "innerq-small", "turboquant-4")


def papers_embeddings(results):
    """TurboQuant's Figures 1 and 2 on sentence embeddings: bias and error of inner products."""
    rows = []
    for bits in (1, 2, 3, 4, 5):
        lines = [
            results.newest("papers_embeddings.csv", {"data": "minilm", "bits": bits, "form": form})
            for form in FORMS
        ]
        cells = [significant(lines[0].number("mse")), significant(lines[0].number("mse_upper"))]
        cells += [f"{100 * line.number('slope'):+.2f} %" for line in lines]
        rows.append([bits, *cells, *(significant(line.number("error")) for line in lines)])
    names = ("`scale=norm`", "`qjl`", "`scale=unbiased`")
    heading = ["bits", "D, `scale=norm`", "the paper's bound of D"]
    heading += [f"bias, {name}" for name in names]
    return table([*heading, *(f"error, {name}" for name in names)], *rows)


def papers_products(results):
    """TurboQuant's Figure 2c: QK^T of a decoded token on one CPU thread, and of a longer context on
    an H200, times float32 einsum.
    """
    rows, file = [], "papers_products.csv"
    on_cpu = {"kv_heads": "8", "gqa": "4", "tokens": "16384"}
    on_gpu = {"kv_heads": "1", "gqa": "32", "tokens": "1048576"}
    for name in dict.fromkeys(x["product"] for x in results.lines(file, on_cpu)):
        cells = [f"PyTorch, {name.split(', ')[1]}" if ", " in name else code(name)]
        for wanted in (on_cpu, on_gpu):
            line = results.newest(file, {**wanted, "product": name})
            cells.append(f"{line.number('microseconds') / 1000:.{2 if wanted is on_gpu else 1}f}")
            cells.append(f"{line.number('times_float32'):.2f}")
        rows.append(cells)
    heading = ["CPU, milliseconds", "CPU, times float32", "H200, milliseconds"]
    return table(["product", *heading, "H200, times float32"], *rows)


def papers_innerq_depth(results):
    """Attention of InnerQ on a CPU thread by tokens in the cache, times as fast as KIVI-2."""
    rows, kivi = [], {}
    for codec in GROUPED:
        cells = []
        for tokens in CPU_TOKENS:
            line = results.newest("papers_attention.csv", {"k": codec, "tokens": tokens})
            took = line.number("microseconds")
            cells.append(f"{kivi.setdefault(tokens, took) / took:.2f}")
        v = line["v"]
        rows.append([code(codec) if v == codec else f"{code(codec)} / {code(v)}", *cells])
    return table(["keys / values", *(f"{int(n):,} tokens" for n in CPU_TOKENS)], *rows)


def papers_innerq_gpu(results):
    """The same on an H200."""
    rows, kivi = [], {}
    for codec in GROUPED[:-1]:
        cells = []
        for tokens in GPU_TOKENS:
            line = results.newest("cuda_innerq.csv", {"k": codec, "tokens": tokens})
            took = line.number("microseconds")
            cells.append(f"{kivi.setdefault(tokens, took) / took:.2f}")
        rows.append([code(codec), *cells])
    return table(["keys / values", *(f"{int(n):,} tokens" for n in GPU_TOKENS)], *rows)


def papers_needles(results):
    """Facts that models find with OCTOPUS's recipe at 3 and 2 bits, and with `trellis`."""
    lines = results.lines("needles_bits.csv")
    rows, models = {}, [name for name in MODELS if any(x["model"] == name for x in lines)]
    for model in models:
        of_model = [x for x in lines if x["model"] == model]
        for k in dict.fromkeys(x["k"] for x in of_model):
            depths = {x["depth"]: x for x in of_model if x["k"] == k}.values()
            for x in depths:
                results.used.append((x, []))
            found = sum(x.number("exact") * x.number("trials") for x in depths)
            asked = sum(x.number("trials") for x in depths)
            first = next(iter(depths))
            row = rows.setdefault(k, [recipe_key(k), {}, {}])
            row[1][model] = f"{first.number('bits'):.2f}"
            row[2][model] = f"{found:.0f} of {asked:.0f}"
    names = [f"{what}, {MODELS[m]}" for what in ("true bits", "found") for m in models]
    cells = ([row[0], *(row[i].get(m) for i in (1, 2) for m in models)] for row in rows.values())
    return table(["keys", *names], *cells)


def papers_ideas(results):
    """Tiers and k-means inside learned W, 3 bits: KL of single heads relative to trellis at equal
    bits, with its interval of 95 %."""
    models = {**MODELS, "Qwen2.5-1.5B": "Qwen2.5-1.5B"}
    lines = results.lines("papers_ideas.csv")
    rows = []
    for name in dict.fromkeys(x["idea"] for x in lines if x["idea"].startswith("trellis-3, ")):
        if name.endswith("W in one part"):
            continue  # asks whether tiers only repair the parts of W; the page does not
        row = [name.partition(", ")[2]]
        for model in models:
            line = results.maybe("papers_ideas.csv", {"idea": name, "model": model})
            ends = ("geometric", "geometric_low", "geometric_high")
            numbers = [f"{line.number(end):.2f}" for end in ends] if line else []
            row.append("{} ({} to {})".format(*numbers) if line else "")
        rows.append(row)
    return table(["idea", *models.values()], *rows)


def papers_layer0(results):
    """Keys of layer 0 in more bits, and as many bits for keys of layers spread over the model."""
    places = {
        "alike": "none",
        "layer0-8-bit": "keys of layer 0 in 8 bits",
        "spread-5": "keys of 5 layers in 4 bits",
        "spread-4": "keys of 4 layers in 5 bits",
        "layer0-f16": "keys of layer 0 in fp16",
        "spread-13": "keys of 13 layers in 4 bits",
        "spread-12": "keys of 12 layers in 5 bits",
    }
    rows = []
    for bits in (3, 4):
        for name, label in places.items():
            wanted = {"k": f"trellis-{bits}_{name}.kvant"}
            lines = [
                results.maybe("quality_papers.csv", {**wanted, "model": model}) for model in MODELS
            ]
            if any(lines):
                cells = [divergence(x.number("kld_mean")) if x else "" for x in lines]
                rows.append([code(f"trellis-{bits}"), label, *cells])
    return table(["codec", "more bits for", *(f"KLD, {name}" for name in MODELS.values())], *rows)
