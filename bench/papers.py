#!/usr/bin/env python3
"""Repeats the papers' ablations on small models: KL divergence from the f16 cache.

    bench/papers.py -m model.gguf -f text.txt -o bench/results/quality_papers.csv [GROUP]...

A group of configurations answers one question. It is one `kvant eval`, whose results
bench/record.py appends. Settings that have a line are skipped, and an interrupted group continues
(--resume, in --work). So the same command, repeated, ends with all lines. docs/evidence/papers.md
shows them. `make papers` runs all groups on three models; bench/long_contexts.py measures long
contexts on a GPU, and any of these groups.
"""

import argparse
import csv
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
FNV_START, FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3
STORES_PAIRS = "SmolLM2"  # of the models, the only one that stores RoPE's pairs side by side
CHUNKS = {"hqmq-seeds": "3"}  # contexts of groups that need more than --chunks
# The groups that score contexts of 2048 tokens; all other groups score 1024.
LONGER = {"SmolLM2": ("bdr", "hqmq", "orders", "hqmq-seeds", "layer0"), "Gemma-3": ("bdr",)}
SHAPES = {"SmolLM2": (30, "3x64"), "Qwen2.5": (24, "2x64"), "Gemma-3": (18, "1x256")}


def both(*specs):
    return [(spec, spec) for spec in specs]


def bdr():
    """SAW-INT4 Tables 2, 3, 8: only keys are rotated and values stay INT4; block orders; its text's
    random signs."""
    orders = (
        "bdr-4:block=16",
        "bdr-4:block=64",
        "bdr-4:block=128",
        "bdr-4:block=16,signs=seed",
        "bdr-4:signs=seed",
    )
    return both("int-4", "bdr-4", *orders) + [
        ("bdr-4", "int-4"),
        ("bdr-4:block=16", "int-4"),
        ("int-4", "bdr-4"),
    ]


def kmeans():
    """SAW-INT4 Tables 2 and 9: 1 to 2048 centroids, alone and before BDR. The Hessian basis pools
    queries by kv head, and by layer as in the paper. Needs a calibration with these sets:
    kvant calibrate -n 8192 -c 1024 --clusters 16,256,2048 --sample 8192."""
    blocks = ("", ",block=64", ",block=16")
    return both(
        "int-4",
        "bdr-4",
        *(f"kmeans-4:c={c}{block}" for block in blocks for c in (1, 16, 256, 2048)),
        "hessian-4",
        "hessian-4:pool=layer",
    )


PAPERS_HQMQ = "book=random,scale=norm"


def hqmq():
    """HQMQ Tables 8 to 10: its codec in its own form, and its authors' symmetric naive INT."""
    names = ("s24r2", "s24r3", "s24r4", "s48r4", "s96r4", "s192r4", "s24r6", "s96r6", "s192r6")
    return both(
        "int-4:sym",
        "int-3:sym",
        "int-4",
        *(f"hqmq-{name}:{PAPERS_HQMQ}" for name in names),
        "hqmq-s96r4",
    )


def hqmq_med3():
    """HQMQ Tables 2 and 18: Med3x as published (the median of a page, room for 1 chunk in 16), with
    INT and with HQMQ; the scale of all chunks, as in its program; other multiples."""
    page = "median=page"
    return both(
        "int-4:sym",
        "int-3:sym",
        "naive-4",
        "naive-3",
        "naive-4:med=5",
        "naive-4:range=all",
        *(f"hqmq-{name}:{PAPERS_HQMQ},med3,{page}" for name in ("s24r6", "s96r6", "s192r6")),
        *(f"hqmq-{name}:{PAPERS_HQMQ},med=5,{page}" for name in ("s24r6", "s192r6")),
        f"hqmq-s24r6:{PAPERS_HQMQ},med3,{page},range=all",
        f"hqmq-s96r6:{PAPERS_HQMQ},med3",
        f"hqmq-s96r6:{PAPERS_HQMQ}",
        *(f"hqmq-s96r6:{PAPERS_HQMQ},med={c},{page}" for c in (5, 10, 20, 50, 100)),
        *(f"hqmq-s96r4:{PAPERS_HQMQ}{rest}" for rest in ("", f",med3,{page}")),
    ) + [room_by_role(r, f"{PAPERS_HQMQ},med3,{page}") for r in ((4, 112, 4, 16), (6, 80, 4, 16))]


def room_by_role(numbers, options):
    """Med3x with more room for outliers in keys than in values. On scripts/fetch.py's text a page
    of Qwen2.5's keys has 62 outliers on average, and a page of values has 11. numbers: bits of the
    radius and slots, of keys and then of values.
    """
    k, k_slots, v, v_slots = numbers
    return f"hqmq-s96r{k}:{options},slots={k_slots}", f"hqmq-s96r{v}:{options},slots={v_slots}"


def outlier_chunks(rows):
    """For each page of 64 tokens of a head, [tokens, head_dim], the chunks above 3 medians."""
    import numpy as np

    norms = np.linalg.norm(rows.astype(float).reshape(len(rows) // 64, -1, 4), axis=2)
    medians = np.sort(norms, 1)[:, (norms.shape[1] - 1) // 2]
    return (norms > 3 * medians[:, None]).sum(1)


def room_by_layer(model, folder, captured):
    """Med3x whose room follows its layers, as the paper's room does by itself, with HQMQ and with
    INT4. The room of a layer and role is a share of the outliers in the largest page of a captured
    text. The share is the same everywhere: as many tenths as keep the average room at most at the
    usual 1 chunk in 16. The captured text must not be the scored one. The same codecs with the
    usual room are settings files, too, because a cache with a settings file keeps kvant's exact
    part.
    """
    sys.path.insert(0, str(HERE.parent / "integrations" / "python"))
    from kvant.tuning import safetensors

    layers, shape = SHAPES[model]
    n_heads, head_dim = map(int, shape.split("x"))
    with safetensors.File(captured) as file:
        largest = {
            (role, layer): max(
                outlier_chunks(head[: len(head) // 64 * 64]).max()
                for head in file.read(f"layers.{layer}.{role}").reshape(n_heads, -1, head_dim)
            )
            for role in "kv"
            for layer in range(layers)
        }
    for tenths in range(10, 0, -1):
        # In steps of 8 slots.
        room = {place: max(8, -(-n * tenths // 80) * 8) for place, n in largest.items()}
        if sum(room.values()) <= len(room) * 64 * head_dim / 4 / 16:
            break
    codecs = {
        "hqmq-s96r4": f"hqmq-s96r4:{PAPERS_HQMQ},med3,median=page",
        "naive-4": "naive-4:med=3",
    }
    alike = f"0-{layers - 1} {shape}"
    return [
        settings_file(
            folder / f"{name}_med3_room.kvant",
            layers,
            [f"{role} {layer} {shape} {spec},slots={n}" for (role, layer), n in room.items()],
        )
        for name, spec in codecs.items()
    ] + [
        settings_file(
            folder / f"{name}_med3_alike.kvant", layers, [f"{r} {alike} {spec}" for r in "kv"]
        )
        for name, spec in codecs.items()
    ]


def layer0(model, folder, b=3, higher="trellis-4"):
    """Keys of layer 0 in fp16 or in 8 bits, all other rows `trellis` with learned W. After each of
    these files follows one with the same bits: as many more bits for the keys of layers that are
    spread over the model. So the difference from the line before (kld_step) is the verdict."""
    layers, files = SHAPES[model][0], [keys_by_layer(model, folder, b, "alike", {})]
    for name, first, more in (("8-bit", "turboquant-8", 8 - b), ("f16", "f16", 16 - b)):
        spread = dict.fromkeys(
            [round((i + 0.5) * layers / more - 0.5) for i in range(more)], higher
        )
        files.append(keys_by_layer(model, folder, b, f"layer0-{name}", {0: first}))
        files.append(keys_by_layer(model, folder, b, f"spread-{more}", spread))
    return files


def layer0_4(model, folder):
    """The same where all keys have 4 bits. No `trellis` has 5 bits, so `turboquant` stands in."""
    return layer0(model, folder, 4, "turboquant-5")


def keys_by_layer(model, folder, bits, name, keys):
    """A settings file: the keys of some layers have another codec, {layer: codec}."""
    layers, shape = SHAPES[model]
    lines = [f"v 0-{layers - 1} {shape} trellis-{bits}"]
    for layer in range(layers):
        codec = keys.get(layer, f"trellis-{bits}")
        lines.append(f"k {layer} {shape} {codec}" + ":transform=first" * (codec != "f16"))
    return settings_file(folder / f"trellis-{bits}_{name}.kvant", layers, lines)


def hqmq_seeds():
    """HQMQ Table 14. On 511 positions the sampling error hides what a seed does."""
    book = f"hqmq-s96r4:{PAPERS_HQMQ},order=halves"
    return both(*(f"{book},seed={seed}" for seed in (0, 1, 7, 42, 1337)))


def orders():
    """HQMQ, its ablation with additive books (Table 16, with the authors' greedy search), InnerQ's
    groups and BDR with keys in other orders of channels. The papers' models store halves, and
    Llama-type GGUF files store pairs. A centre and a norm are not the papers'."""
    learned = "center=first,norm=first"
    return both(
        *(f"hqmq-s96r4:{PAPERS_HQMQ},order={order}" for order in ("halves", "dealt")),
        *(f"hqmq-{name}:{PAPERS_HQMQ},order=halves" for name in ("s24r3", "s192r4")),
        "hqmq-s96r4:order=halves",
        f"hqmq-s96r4:{learned}",
        *(f"hqmq-s96r4:order={order},{learned}" for order in ("halves", "dealt")),
        "innerq-base:order=halves",
        "bdr-4:block=16,order=halves",
        "addvq-k48r4:search=greedy,scale=norm,order=halves",
    )


def settings_file(path, layers, lines):
    """A settings file: its check sum is FNV-1a (settings.md)."""
    text = f"kvant-settings 1\nlayers {layers}\n" + "".join(f"{line}\n" for line in lines)
    check = FNV_START
    for byte in text.encode():
        check = (check ^ byte) * FNV_PRIME % 2**64
    path.write_text(f"{text}check {check:016x}\n")
    return path


def hqmq_books(model, folder):
    """HQMQ Table 14 with a book for every layer, head and role, as in the paper."""
    layers, shape = SHAPES[model]
    heads, files = int(shape.partition("x")[0]), []
    for first in (0, 1, 7, 42, 1337):
        places = [
            (role, f"{layer}/{head}" if heads > 1 else str(layer))
            for role in "kv"
            for layer in range(layers)
            for head in range(heads)
        ]
        lines = [
            f"{role} {place} {shape} hqmq-s96r4:{PAPERS_HQMQ},seed={10000 * first + i}"
            for i, (role, place) in enumerate(places)
        ]
        files.append(settings_file(folder / f"hqmq-s96r4_books_{first}.kvant", layers, lines))
    return files


RECIPE = (  # keys of OCTOPUS's recipe; Table 2 of the paper has all but the last
    "octopus-{b}:scale=norm,recent=32",
    "turboquant-{b}:scale=norm,recent=32",
    "polar-{b}:scale=norm,recent=32",
    "turboquant-{b}:qjl,recent=32",
    "octopus-{b}:scale=norm,qjl,recent=32",
)


def recipe_pairs(bits, keys=RECIPE):
    return [(key.format(b=b), f"int-{b}:group=32,recent=32") for b in bits for key in keys]


def octopus():
    """OCTOPUS Table 2. In its recipe values are integers in groups of 32. The 32 newest tokens and
    the outer layers' keys stay fp16. recipe_options() keeps the outer layers' values in fp16, too.
    Only a settings file could tell values from keys there, and a cache with a settings file keeps
    kvant's exact part."""
    return recipe_pairs((4, 3, 2))


def octopus_recipe(model, folder):
    """The recipe as settings files, for bench/long_contexts.py: the outer layers' values stay
    compressed, but caches with a settings file keep kvant's exact part, too."""
    layers, shape = SHAPES[model]
    files = []
    for spec, value in recipe_pairs((4, 3, 2), RECIPE[:-1]):
        lines = [
            f"k 0,{layers - 1} {shape} f16",
            f"k 1-{layers - 2} {shape} {spec}",
            f"v 0-{layers - 1} {shape} {value}",
        ]
        name = spec.replace(":", "_").replace(",", "_").replace("=", "-")
        files.append(settings_file(folder / f"{name}.kvant", layers, lines))
    return files


def innerq_modes():
    """InnerQ Table 7: symmetric, asymmetric and hybrid groups of keys and values along the inner
    dimension."""
    window = "sink=32,recent=96"
    keys = {
        "sym": f"int-3:group=32,sym,norm=first,{window}",
        "asym": f"int-3:group=32,norm=first,{window}",
    }
    value = {"sym": ",sym", "asym": "", "hybrid": ",hybrid", "hybrid=code": ",hybrid=code"}
    pairs = [(k, v) for k in keys for v in ("sym", "asym")] + [
        ("sym", "hybrid"),
        ("sym", "hybrid=code"),
    ]
    return [
        (keys[k], f"int-{b}:axis=channel,group=32{value[v]},{window}")
        for b in (3, 2)
        for k, v in pairs
    ]


def innerq_windows():
    """InnerQ Figure 5: 128 tokens in fp16, divided between the first and the newest tokens; here
    they are whole pages of 64. Table 1: TurboQuant."""
    names = ("innerq-base", "innerq-hybrid", "innerq-small", "kivi-2")
    windows = both(
        *(f"{name}:sink={sink},recent={128 - sink}" for name in names for sink in (0, 64, 128))
    )
    return windows + [("turboquant-4:scale=norm,recent=128", "turboquant-3:scale=norm,recent=128")]


def turboquant():
    """TurboQuant section 4.3: "quality neutral" at 3.5 bits, marginal at 2.5; InnerQ's K4/V3 of
    it."""
    return both(
        "turboquant-2.5:scale=norm",
        "turboquant-3.5:scale=norm",
        "turboquant-3.5",
        "turboquant-3:scale=norm",
        "turboquant-4:scale=norm",
        "turboquant-4:qjl,sketch=gaussian",
    ) + [("turboquant-4:scale=norm,recent=128", "turboquant-3:scale=norm,recent=128")]


def needles():
    """OCTOPUS Table 8 at 3 and 2 bits: its recipe, and `trellis` with learned W, which takes about
    as many true bits when its name says one bit more."""
    trellis = [
        (f"trellis-{b}:transform=first", f"trellis-{b}" + ":transform=first" * (b == 2))
        for b in (4, 3, 2)
    ]
    return recipe_options(recipe_pairs((3, 2))) + [
        word for k, v in trellis for word in ("-k", k, "-v", v)
    ]


def recipe_options(pairs):
    return [word for k, v in pairs for word in ("-k", k, "-v", v, "--protect", "1")]


GROUPS = {
    "bdr": bdr,
    "hqmq": hqmq,
    "octopus": octopus,
    "turboquant": turboquant,
    "innerq-modes": innerq_modes,
    "innerq-windows": innerq_windows,
    "hqmq-med3": hqmq_med3,
    "orders": orders,
    "hqmq-seeds": hqmq_seeds,
    "hqmq-books": hqmq_books,
    "kmeans": kmeans,
    "layer0": layer0,
    "layer0-4": layer0_4,
}


ROOM = "hqmq-room"  # a group that needs --captured
FILES = ("hqmq-books", "layer0", "layer0-4", ROOM)  # groups of settings files


def in_order(model, spec):
    """A spec with the papers' order of channels, which most models have without order=halves."""
    if model == STORES_PAIRS:
        return spec
    name, _, options = spec.partition(":")
    kept = [option for option in options.split(",") if option not in ("", "order=halves")]
    return name + (":" + ",".join(kept) if kept else "")


def options_of(group, model, folder, done, captured=None):
    if group in FILES:
        files = (
            room_by_layer(model, folder, captured)
            if group == ROOM
            else GROUPS[group](model, folder)
        )
        files = [file for file in files if file.name not in done]
        return [word for file in files for word in ("--config", str(file))]
    pairs = [(in_order(model, k), in_order(model, v)) for k, v in GROUPS[group]()]
    pairs = [pair for pair in dict.fromkeys(pairs) if pair not in done]
    if model != "Gemma-3" and group == "bdr":  # heads of 64 have blocks of at most 64, the default
        pairs = [
            pair for pair in pairs if not {"block=64", "block=128"} & {pair[0].partition(":")[2]}
        ]
    if group == "octopus":
        return recipe_options(pairs)
    return [word for k, v in pairs for word in ("-k", k, "-v", v)]


def have(path, model, group):
    """Pairs and files that have a row."""
    if not path.exists():
        return set()
    with open(path, newline="") as file:
        rows = [
            row for row in csv.DictReader(file) if row["model"] == model and row["group"] == group
        ]
    return {(row["k"], row["v"]) for row in rows} | {row["config"] for row in rows}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", required=True, type=pathlib.Path)
    parser.add_argument("-f", "--text", required=True)
    parser.add_argument(
        "-o", "--output", required=True, type=pathlib.Path, help="CSV that rows are appended to"
    )
    parser.add_argument(
        "-w",
        "--work",
        type=pathlib.Path,
        default=pathlib.Path("papers_work"),
        help="folder of unfinished runs",
    )
    parser.add_argument("-c", "--ctx", help="tokens of a context; the default repeats the lines")
    parser.add_argument("--chunks", default="1")
    parser.add_argument("--calibration", help="for the group kmeans")
    parser.add_argument(
        "--captured",
        help=f"for the group {ROOM}: kvant capture -n 1024 -c 1024 of another text than -f",
    )
    parser.add_argument("--kvant", default="kvant", help="the program")
    parser.add_argument(
        "--needles",
        metavar="TEXTS",
        help="needles at 2 and 3 bits instead: so many texts of --ctx tokens, with 20 facts each",
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=" ".join([*GROUPS, ROOM]))
    given = parser.parse_args()
    model = next((name for name in SHAPES if given.model.name.startswith(name)), None)
    if model is None:
        parser.error(f"no shape known for {given.model.name}: {', '.join(SHAPES)}")
    given.work.mkdir(parents=True, exist_ok=True)
    if given.needles:
        count = ["-n", "20", "-r", given.needles]
        return record(given, model, "needles", ["needle", *count], needles())
    needs = {"kmeans": given.calibration, ROOM: given.captured}
    groups = [*GROUPS, ROOM]
    for group in given.groups or [name for name in groups if needs.get(name, True)]:
        if group not in groups or not needs.get(group, True):
            parser.error(f"no group {group!r}, or it needs a file: {', '.join(groups)}")
        done = have(given.output, model, group)
        options = options_of(group, model, given.work, done, given.captured)
        if not options:
            continue
        if given.calibration:
            options += ["--calibration", given.calibration]
        count = ["--chunks", CHUNKS.get(group, given.chunks), "--base-cache", str(given.work)]
        record(given, model, group, ["eval", *count], options)
    return None


def record(given, model, group, command, options):
    """Runs a command of kvant for the configurations in options, and appends its results."""
    about = ["--set", f"model={model}", "--set", f"group={group}", str(given.output)]
    about += ["--", given.kvant, command[0], "-m", str(given.model), "-f", given.text]
    longer = group in (*LONGER.get(model, ()), "needles")
    about += ["-c", given.ctx or ("2048" if longer else "1024"), *command[1:]]
    about += ["--resume", str(given.work / f"{model}_{group}")]
    script = [sys.executable, str(HERE / "record.py"), "--append", *about, "--json", *options]
    if subprocess.run(script, check=False).returncode:
        sys.exit(f"papers: the group {group} did not end; the same command goes on")


if __name__ == "__main__":
    main()
