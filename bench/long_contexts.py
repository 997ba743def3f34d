#!/usr/bin/env python3
"""KL divergence by position, and needles, of compressed caches in contexts up to a model's limit,
on a GPU. Reads the files of bench/long_prepare.py and writes CSV.

    bench/long_contexts.py FOLDER/model.gguf -o bench/results/long_contexts.csv \\
        --needles bench/results/needles.csv

Prompts are decoded 512 tokens at a time, so that each position sees a compressed past. Weights, the
reference cache and attention over it are float32. The line f16 is the floor: an exact cache with
kvant's attention. q8_0 and q4_0 are rotated and rounded as in llama.cpp, fp8 (e4m3) is rounded as
in PyTorch, with attention in float32. The most important lines are computed first and written at
once; lines that the files have are skipped. --limit ends the run in time. KVANT_LIBRARY and
KVANT_CUDA_LIBRARY name the libraries."""

import csv
import functools
import gc
import math
import os
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "integrations" / "python"), str(HERE)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402

import kvant  # noqa: E402
import papers  # noqa: E402
from kvant.codec import needs_calibration  # noqa: E402
from kvant.transformers import KvantCache  # noqa: E402
from record import options_of  # noqa: E402

BATCH = 512  # tokens of a pass
WHO = "machine pytorch transformers commit command model cache k v settings calibrated".split()
POSITIONS = [
    *WHO,
    *"context contexts from to tokens kld_mean kld_se ppl top1 bytes f16_bytes seconds".split(),
]
NEEDLES = [*WHO, *"kind tokens texts found nll agree kld_mean found_f32 seconds".split()]


# The caches that are compared


class Rounded(DynamicCache):
    """A stock cache whose rows were rounded on the way in."""

    def __init__(self, config, rounding):
        super().__init__(config=config)
        self.rounding = rounding

    def update(self, k, v, *arguments, **options):
        k, v = self.rounding(k, "k"), self.rounding(v, "v")
        return super().update(k, v, *arguments, **options)


@functools.cache
def hadamard(n, device):
    """The orthonormal Hadamard matrix of Sylvester's order, which is its own inverse."""
    made = torch.ones(1, 1, device=device)
    while len(made) < n:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    return made * n**-0.5


def rotated(rounding):
    """A rounding of llama.cpp's quantised caches, which rotate blocks of channels first
    (LLAMA_ATTN_ROT_DISABLE in llama-kv-cache.cpp): keys in blocks of the largest power of two that
    divides head_dim, values in blocks of 64. Heads that are no multiple of 64 are not rotated.
    Attention rotates queries and results alike, so rotating the rows back gives the same answers.
    """

    def rounded(rows, role):
        d = rows.shape[-1]
        if d % 64:
            return rounding(rows)
        h = hadamard(d & -d if role == "k" else 64, rows.device)
        blocks = rounding((rows.unflatten(-1, (-1, len(h))) @ h).flatten(-2))
        return (blocks.unflatten(-1, (-1, len(h))) @ h).flatten(-2)

    return rounded


def q8_0(rows):
    x = rows.unflatten(-1, (-1, 32))
    d = x.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(d > 0, 1 / d, 0)
    return ((x * inverse).round() * d.half().float()).flatten(-2)


def q4_0(rows):
    x = rows.unflatten(-1, (-1, 32))
    d = x.gather(-1, x.abs().argmax(-1, keepdim=True)) / -8
    inverse = torch.where(d != 0, 1 / d, 0)
    return (((x * inverse + 8.5).floor().clamp(0, 15) - 8) * d.half().float()).flatten(-2)


def fp8(rows, role):
    return rows.to(torch.float8_e4m3fn).float()


STOCK = {"q8_0": rotated(q8_0), "q4_0": rotated(q4_0), "fp8": fp8}
BOOK = papers.PAPERS_HQMQ


def spec(k, v=None):
    return {"k": k, "v": v or k}


def wanted(model, folder, calibration):
    """(name, arguments of KvantCache or a rounding), the most important first."""
    kept = [
        {"preset": name, "calibration": calibration} for name in ("balanced", "small", "quality")
    ]
    plain = [{"preset": name} for name in ("balanced", "small", "quality")]
    recipe = {file.stem: {"settings": str(file)} for file in papers.octopus_recipe(model, folder)}
    named = [row for name, row in recipe.items() if "-4_" in name or "-2_" in name]
    tiny = [
        spec("trellis-2:transform=file", "trellis-2:center=file") | {"calibration": calibration}
    ]
    first = [
        spec("int-4"),
        spec("bdr-4"),
        spec(f"hqmq-s96r4:{BOOK}"),
        spec("octopus-4:scale=norm"),
        spec("turboquant-4:scale=norm"),
        spec("innerq-base"),
        spec("kivi-2"),
        *tiny,
        spec(f"hqmq-s24r3:{BOOK}"),
        spec("octopus-2:scale=norm"),
        spec("turboquant-2:scale=norm"),
    ]
    last = [
        spec("trellis-4:center=first,norm=first", "trellis-4:center=first"),
        spec("int-3:sym"),
        spec("innerq-small"),
        spec("innerq-hybrid"),
        spec("turboquant-3.5:scale=norm"),
        spec("turboquant-2.5:scale=norm"),
        spec("kivi-2:sink=32,recent=96"),
        spec("turboquant-4"),
        spec("octopus-4"),
    ]
    caches = [
        spec("f16"),
        kept[0],
        plain[0],
        kept[1],
        plain[1],
        "q4_0",
        "q8_0",
        kept[2],
        *first,
        spec(f"hqmq-s96r6:{BOOK},med3"),
        plain[2],
        "fp8",
        *named,
        *last,
    ]
    return [(cache, {}) if isinstance(cache, str) else (name_of(cache), cache) for cache in caches]


def of_group(group, model, folder, calibration):
    """The configurations of a group of bench/papers.py."""
    files = {"octopus": papers.octopus_recipe, **{g: papers.GROUPS.get(g) for g in papers.FILES}}
    if group in files:
        caches = [{"settings": str(file)} for file in files[group](model, folder)]
    else:
        caches = [spec(k, v) for k, v in papers.GROUPS[group]()]
        for cache in caches:
            if any(needs_calibration(cache[role], role) for role in "kv"):
                cache["calibration"] = calibration
    return [(name_of(cache), cache) for cache in caches]


def learns(options):
    """Whether a cache learns from its first rows; if so, each text has a separate cache."""
    specs = options.get("k", ""), options.get("v", "")
    return (
        "preset" in options
        and "calibration" not in options
        or any("=first" in text or "innerq" in text for text in specs)
    )


def name_of(options):
    if "preset" in options:
        return options["preset"]
    if "settings" in options:
        return pathlib.Path(options["settings"]).stem
    return options["k"] if options["k"] == options["v"] else f"{options['k']} {options['v']}"


class Run:
    def __init__(self, a):
        self.a, self.begin = a, time.monotonic()
        self.end = self.begin + min(a.limit, a.position_limit)
        self.model_name = next(name for name in papers.SHAPES if a.model.name.startswith(name))
        self.model = (
            AutoModelForCausalLM.from_pretrained(
                a.model.parent,
                gguf_file=a.model.name,
                dtype=torch.float32,
                attn_implementation="sdpa",
            )
            .to(a.device)
            .eval()
        )
        self.arrays = {
            name: torch.from_numpy(np.asarray(x, np.int64))
            for name, x in np.load(a.model.with_suffix(".npz")).items()
        }
        self.positions = a.positions or min(self.model.config.max_position_embeddings, 32768)
        self.clusters = tuple(int(n) for n in a.clusters.split(",")) if a.clusters else ()
        self.calibration = (
            a.work / f"{a.model.stem}{'_clusters' if a.clusters else ''}_{self.positions}.kvcal"
        )
        self.who = dict(
            machine=torch.cuda.get_device_name() if a.device == "cuda" else "CPU",
            pytorch=torch.__version__.split("+")[0],
            transformers=transformers.__version__,
            commit=a.commit,
            model=self.model_name,
            command=f"long_contexts.py {a.model.name}",
        )

    def calibrate(self):
        if not self.calibration.exists():
            ids = self.arrays["calibration"][: self.a.calibrate]
            kvant.calibrate(self.model, ids, clusters=self.clusters, positions=self.positions).save(
                self.calibration
            )
            print(
                f"calibrated on {len(ids)} tokens after {time.monotonic() - self.begin:.0f} s",
                flush=True,
            )

    def cache(self, name, options, tokens):
        if name in STOCK:
            return Rounded(self.model.config, STOCK[name])
        return (
            KvantCache(self.model.config, max_tokens=tokens, **options)
            if options
            else DynamicCache(config=self.model.config)
        )

    def attending(self, options):
        self.model.set_attn_implementation("kvant" if options else "sdpa")

    def describe(self, name, options):
        return self.who | {
            "cache": name,
            "k": options.get("k", ""),
            "v": options.get("v", ""),
            "settings": pathlib.Path(options.get("settings", "")).name,
            "calibrated": self.calibrated(options),
        }

    def calibrated(self, options):
        """Up to which position the calibration's contexts lie; 0 without."""
        return self.positions if "calibration" in options else 0

    def passes(self, ids, cache, kept=None):
        """Log-probabilities [sequences, n, words] of each pass, or of passes with the last `kept`
        tokens."""
        length = ids.shape[1]
        for start in range(0, length, BATCH):
            part = ids[:, start : start + BATCH].to(self.a.device)
            n = (
                part.shape[1]
                if kept is None
                else min(max(start + part.shape[1] - (length - kept), 0), part.shape[1])
            )
            logits = self.model(
                part, past_key_values=cache, use_cache=True, logits_to_keep=max(n, 1)
            ).logits
            if n:
                yield start + part.shape[1] - n, torch.log_softmax(logits[:, -n:].float(), -1)


def mean(values):
    return sum(values) / len(values)


def error(values):
    x = mean(values)
    return math.sqrt(sum((y - x) ** 2 for y in values) / max(len(values) - 1, 1) / len(values))


# By position


def edges(length):
    found = [0, min(1024, length)]
    while found[-1] < length:
        found.append(min(2 * found[-1], length))
    return found


def positions(run, name, options, ids, reference):
    """Results for ranges of positions. `reference`: log-probabilities of all positions, made by the
    first call."""
    begin, made, n = time.monotonic(), not reference, ids.shape[1]
    run.attending(options)
    texts, sums, size = 1 if learns(options) else len(ids), [], ["", ""]
    for first in range(0, len(ids), texts):
        some = ids[first : first + texts]
        cache, of_text = run.cache(name, options, len(some) * (n + 64)), []
        for start, found in run.passes(some, cache):
            if made:
                reference.append(found)
            wanted_ = reference[start // BATCH][first : first + texts]
            targets = some[:, start + 1 : start + 1 + found.shape[1]].to(found.device)
            of_text.append(
                (
                    (wanted_.exp() * (wanted_ - found)).sum(-1).cpu(),
                    -found[:, : targets.shape[1]].gather(2, targets[..., None])[..., 0].cpu(),
                    (wanted_.argmax(-1) == found.argmax(-1)).float().cpu(),
                )
            )
        sums.append([torch.cat(x, 1) for x in zip(*of_text)])
        if options:
            size = [
                have + more
                for have, more in zip(size if first else (0, 0), (cache.bytes, cache.f16_bytes))
            ]
        del cache
    kld, nll, top = (torch.cat(x) for x in zip(*sums))
    took = time.monotonic() - begin
    for first, last in zip(edges(n), edges(n)[1:]):
        part, text = kld[:, first:last].flatten().double(), nll[:, first:last].flatten().double()
        se = float(part.std()) / math.sqrt(len(part))
        yield run.describe(name, options) | {
            "context": n,
            "contexts": len(ids),
            "from": first,
            "to": last - 1,
            "tokens": len(part),
            "kld_mean": float(part.mean()),
            "kld_se": se,
            "ppl": math.exp(float(text.mean())),
            "top1": float(top[:, first:last].mean()),
            "bytes": size[0],
            "f16_bytes": size[1],
            "seconds": round(took, 1),
        }


# Needles


def needles(run, name, options, kind, length, references):
    """A result per kind and length. An answer is found when each of its tokens is the most probable
    one after the tokens before it, as greedy decoding would write it. `agree`: answers whose most
    probable tokens are all the reference's."""
    begin = time.monotonic()
    ids, answers = (
        run.arrays[f"{name}_{kind}_{length}"][: run.a.texts] for name in ("needle", "answers")
    )
    kept, found, nll, tops, kld = int(answers.max()) + 1, [], [], [], []
    run.attending(options)
    for part in range(0, len(ids), run.a.sequences):
        some = ids[part : part + run.a.sequences]
        cache = run.cache(name, options, len(some) * (length + 64))
        rows = torch.cat([rows for _, rows in run.passes(some, cache, kept)], 1)
        del cache
        key = kind, length, part
        references.setdefault(key, rows)
        for row, reference, tokens, n in zip(
            rows, references[key], some.to(rows.device), answers[part : part + len(some)].tolist()
        ):
            row, reference, tokens = row[-n - 1 : -1], reference[-n - 1 : -1], tokens[-n:]
            best = row.argmax(-1)
            found.append(bool((best == tokens).all()))
            tops.append(bool((best == reference.argmax(-1)).all()))
            nll.append(float(-row.gather(1, tokens[:, None]).sum()))
            kld.append(float((reference.exp() * (reference - row)).sum(-1).mean()))
    base = references.setdefault((kind, length), sum(found))
    yield run.describe(name, options) | {
        "kind": kind,
        "tokens": length,
        "texts": len(ids),
        "found": sum(found),
        "nll": mean(nll),
        "agree": sum(tops),
        "kld_mean": mean(kld),
        "found_f32": base,
        "seconds": round(time.monotonic() - begin, 1),
    }


# All of it


class Table:
    def __init__(self, path, columns, key):
        self.path, self.columns, self.key, self.have = path, columns, key, set()
        for file in (path, *os.environ.get("HAVE", "").split()):
            if pathlib.Path(file).exists():
                with open(file, newline="") as rows:
                    self.have |= {
                        tuple(row.get(name, "") for name in key) for row in csv.DictReader(rows)
                    }

    def has(self, **place):
        return tuple(str(place[name]) for name in self.key) in self.have

    def add(self, rows):
        new = not self.path.exists()
        with open(self.path, "a", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows(rows)
        for row in rows:
            print(
                " ".join(
                    f"{x:.5g}" if isinstance(x, float) else str(x)
                    for name, x in row.items()
                    if name not in WHO[:5]
                ),
                flush=True,
            )


def attempt(run, table, make, reference, name, options, **place):
    """Rows of one cache, unless they are there; what fails is said, and the rest goes on."""
    place = run.who | {"cache": name, "calibrated": run.calibrated(options)} | place
    if time.monotonic() > run.end:
        return
    if (options or name in STOCK) and table.has(**place):
        return
    try:
        rows = list(make(name, options, reference))
        if not table.has(**place):
            table.add(rows)
    except (kvant.Error, RuntimeError, ValueError) as failed:
        print(f"{name}: {type(failed).__name__} {str(failed)[:300]}", flush=True)
    gc.collect()
    if run.a.device == "cuda":
        torch.cuda.empty_cache()


def main():
    parser = options_of(__doc__)
    parser.add_argument("model", type=pathlib.Path, help="a .gguf with its .npz next to it")
    parser.add_argument("-o", "--output", type=pathlib.Path, help="CSV of KLD by position")
    parser.add_argument("--needles", type=pathlib.Path, help="CSV of needles")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--limit", type=float, default=1e9, help="seconds after which nothing is begun"
    )
    parser.add_argument(
        "--position-limit",
        type=float,
        default=1e9,
        help="seconds for KLD by position; the rest is for needles",
    )
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("long_work"))
    parser.add_argument("--sequences", type=int, default=20, help="needle texts of one batch")
    parser.add_argument("--ctx", type=int, help="of contexts, the first so many tokens")
    parser.add_argument("--contexts", type=int, help="the first so many")
    parser.add_argument("--lengths", help="of needle texts, with commas")
    parser.add_argument(
        "--texts", type=int, help="needle texts of a kind and length, the first so many"
    )
    parser.add_argument(
        "--kinds", help="of needles, with commas; without: of the uncompressed cache alone"
    )
    parser.add_argument("--calibrate", type=int, default=8192, help="tokens")
    parser.add_argument(
        "--positions",
        type=int,
        help="that the calibration's contexts of 2048 tokens are spread over",
    )
    parser.add_argument("--only", help="caches with these names, with blanks")
    parser.add_argument("--caches", type=int, help="the first so many")
    parser.add_argument(
        "--group", choices=papers.GROUPS, help="configurations of bench/papers.py instead"
    )
    parser.add_argument(
        "--clusters",
        help="sizes of sets of centroids in the calibration, with commas: for the group kmeans",
    )
    parser.add_argument("--commit", default=papers_commit())
    a = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    a.work.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        measure(Run(a))


def papers_commit():
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE
    )
    return os.environ.get("COMMIT") or found.stdout.strip() or "unknown"


def measure(run):
    a, ids = run.a, run.arrays["contexts"]
    run.calibrate()
    folder = a.work / run.model_name
    folder.mkdir(exist_ok=True)
    which = run.model_name, folder, str(run.calibration)
    caches = [("f32", {}), *(of_group(a.group, *which) if a.group else wanted(*which))[: a.caches]]
    if a.only:
        caches = [row for row in caches if row[0] in ["f32", *a.only.split()]]
    if a.output:
        table = Table(a.output, POSITIONS, ("machine", "model", "cache", "calibrated", "context"))
        ids = ids[: a.contexts, : a.ctx]
        reference = []
        for name, options in caches:

            def make(name, options, reference):
                return positions(run, name, options, ids, reference)

            attempt(run, table, make, reference, name, options, context=ids.shape[1])
        del reference
    run.end = run.begin + a.limit
    if a.needles:
        table = Table(
            a.needles, NEEDLES, ("machine", "model", "cache", "calibrated", "kind", "tokens")
        )
        references = {}
        there = sorted(
            {int(name.split("_")[2]) for name in run.arrays if name.startswith("needle")},
            reverse=True,
        )
        lengths = [int(n) for n in a.lengths.split(",")] if a.lengths else there
        kinds = a.kinds or ",".join(
            dict.fromkeys(name.split("_")[1] for name in run.arrays if name.startswith("needle"))
        )
        for name, options in caches:
            for length in lengths:
                for kind in (
                    kinds.split(",") if name == "f32" else kinds.replace(",without", "").split(",")
                ):
                    make = lambda name, options, made: needles(
                        run, name, options, kind, length, made
                    )  # noqa: B023, E731
                    attempt(run, table, make, references, name, options, kind=kind, tokens=length)


if __name__ == "__main__":
    main()
