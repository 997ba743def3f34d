"""vLLM on one GPU, Llama 3.1 8B's shape: tokens that fit, speed, and quality."""

from caches import MODELS, divergence_cells
from results import like, starts
from speed import gpu_name
from text import code, table, times

FILE = "vllm.csv"
RIVAL = "auto"
NAMES = {
    "auto": "bfloat16",
    "fp8": "fp8",
    "int4_per_token_head": "vLLM's `int4_per_token_head`",
    "turboquant_4bit_nc": "vLLM's `turboquant_4bit_nc`",
    "int4": "kvant `int4`",
    "turboquant4": "kvant `turboquant4`",
    "fast": "kvant `fast`",
    "balanced": "kvant `balanced`",
    "quality": "kvant `quality`",
    "small": "kvant `small`",
}
RUN = ("device", "commit", "command", "model", "batch", "context")
SHAPES = (
    (1, 1024),
    (1, 32768),
    (16, 1024),
    (32, 4096),
    (4, 32768),
    (64, 4096),
    (8, 32768),
    (256, 8192),
)
LLAMA = {"model": "llama", "layers": "32"}
ONE, TWO = "bench_vllm.py speed", "bench_vllm.py speed --options tensor_parallel_size=2"


def _pair(results, cache, of, batch, context, column):
    """The newest line of a cache, and bfloat16's of the same run."""
    of = {**LLAMA, **of, "batch": batch, "context": context, column: like(".+")}
    return results.pair(FILE, {**of, "cache": cache}, {**of, "cache": RIVAL}, RUN)


def _devices(results):
    return list(dict.fromkeys(line["device"] for line in results.lines(FILE, LLAMA)))


def _by_shape(results, command):
    """Decode speed: a row per GPU and cache, a column per batch and context; empty cells were not
    measured."""
    rows = []
    for device in _devices(results):
        for cache, name in NAMES.items():
            of = {"device": device, "command": command}
            pairs = [_pair(results, cache, of, *shape, "tpot_ms") for shape in SHAPES]
            if any(pairs):
                cells = [_times(*pair) if pair else "" for pair in pairs]
                rows.append([name, ("2 x " if command == TWO else "") + gpu_name(device), *cells])
    columns = [f"{batch} x {context:,}" for batch, context in SHAPES]
    used = [i for i in range(len(columns)) if any(row[i + 2] for row in rows)]
    rows = [row[:2] + [row[i + 2] for i in used] for row in rows]
    return table(["KV cache", "GPU", *(columns[i] for i in used)], *rows)


def _times(ours, rival):
    return times(rival.number("tpot_ms") / ours.number("tpot_ms"))


def vllm_speed(results):
    """Decode speed in vLLM relative to bfloat16 in the same run, by sequences x tokens."""
    return _by_shape(results, ONE)


def vllm_two_gpus(results):
    """Decode speed in vLLM on two GPUs (tensor parallel) relative to bfloat16 on the same two."""
    return _by_shape(results, TWO)


def vllm_fit(results):
    """Tokens that fit into one H200 in vLLM, in millions, and times bfloat16."""
    rows = []
    for cache, name in NAMES.items():
        of = {**LLAMA, "tokens_that_fit": like(".+")}
        line, rival = (results.maybe(FILE, {**of, "cache": c}) for c in (cache, RIVAL))
        if line:
            fit = line.number("tokens_that_fit")
            more = times(fit / rival.number("tokens_that_fit"))
            rows.append([name, gpu_name(line["device"]), f"{fit / 1e6:.2f}", more])
    return table(["KV cache", "GPU", "million tokens", "times bfloat16"], *rows)


# Columns k and v of vllm_quality.csv by the names of vLLM's caches.
LEARNED = "transform=file,sink=0"
STORED = {
    "fp8": ("e4m3", "e4m3"),
    "quality": (f"turboquant-6:{LEARNED}", "trellis-4:center=file,sink=0"),
    "fast": (f"turboquant-6:{LEARNED}", "turboquant-4"),
    "balanced": (f"trellis-4:{LEARNED}", "trellis-4"),
    "turboquant4": ("turboquant-4", "turboquant-4"),
    "small": (f"trellis-3:{LEARNED}", "trellis-3"),
}
# Further codecs with learned transforms of the keys.
FURTHER = ("turboquant-5", "turboquant-4", "int-6", "int-5", "int-4")


def _quality_lines(results, k, v):
    """The line of each model; None where it was not measured."""
    wanted = {"k": k, "v": v, "cache": "fp8" if k == "e4m3" else "kvant"}
    return [results.maybe("vllm_quality.csv", {**wanted, "model": starts(m)}) for m in MODELS]


def _quality_of(results, cache):
    """The lines of one of vLLM's caches, one for each model."""
    if cache in STORED:
        return _quality_lines(results, *STORED[cache])
    spec = {"int4": "int-4", "bdr4": "bdr-4"}[cache]
    wanted = {"cache": "kvant", "k": spec, "v": spec, "protect": "0", "calibration": ""}
    return [results.maybe("quality.csv", {**wanted, "model": starts(m)}) for m in MODELS]


def vllm_quality(results):
    """KLD of the rows that vLLM's caches hold, without the first layer's int-8 keys of presets."""
    sizes, rows = _bytes(results), []
    for cache in (*STORED, "int4"):
        bits = f"{8 * sizes[NAMES[cache]] / 256:.4g}"
        rows.append([NAMES[cache], bits, *divergence_cells(_quality_of(results, cache))])
    heading = ["KV cache", "bits at head_dim 128", *(f"KLD, {name}" for name in MODELS.values())]
    return table(heading, *rows)


# GPUs keep the first block of a sequence and its newest two in fp16.
EXACT = "sink=64,recent=128"


def _exact_lines(results, cache):
    """The lines of each model for codes alone, and with exact blocks."""
    k, v = (spec.split(":")[0] for spec in STORED[cache])
    exact = _quality_lines(results, f"{k}:transform=file,{EXACT}", f"{v}:{EXACT}")
    return _quality_of(results, cache), exact


def vllm_exact(results):
    """KLD of vLLM's caches with codes alone and with exact blocks, which models with windows do not
    have in vLLM."""
    models, rows = [name for name in MODELS.values() if "Gemma" not in name], []
    for cache in ("fast", "balanced"):
        cells = zip(*(divergence_cells(lines) for lines in _exact_lines(results, cache)))
        rows.append([NAMES[cache], *(x for _, pair in zip(models, cells) for x in pair)])
    kinds = ("codes alone", "fp16 ends")
    heading = ["KV cache", *(f"KLD, {name}, {kind}" for name in models for kind in kinds)]
    return table(heading, *rows)


def vllm_transforms(results):
    """KLD of codecs whose keys have learned transforms, with nothing in fp16."""
    rows = [
        [code(f"{codec}:transform=file"), code(codec)]
        + divergence_cells(_quality_lines(results, f"{codec}:{LEARNED}", codec))
        for codec in FURTHER
    ]
    stock = {"cache": "llama.cpp", "k": "q8_0"}
    find = (results.maybe("vllm_quality.csv", {**stock, "model": starts(m)}) for m in MODELS)
    rows.append(["llama.cpp `q8_0`", "", *divergence_cells(find)])
    return table(["keys", "values", *(f"KLD, {name}" for name in MODELS.values())], *rows)


def _bytes(results):
    """{name of a cache: bytes of a token per kv head of 128 numbers, keys and values together}"""
    made = {NAMES["auto"]: 2 * 2 * 128, NAMES["fp8"]: 2 * 128}
    for name, spec in (("int4", "int-4"), ("turboquant4", "turboquant-4")):
        line = results.newest("codecs.csv", {"spec": spec, "head_dim": 128})
        made[NAMES[name]] = 2 * 128 * line.number("bits") / 8
    for preset in ("balanced", "quality", "small"):
        of = {"model": "Llama 3.1 8B", "cache": preset}
        lines = [results.newest("sizes.csv", {**of, "context": n}) for n in (65536, 131072)]
        grown = lines[1].number("pages_bytes") - lines[0].number("pages_bytes")
        heads = lines[0].number("layers") * lines[0].number("kv_heads")
        made[NAMES[preset]] = grown / 65536 / heads
    made[NAMES["fast"]] = made[NAMES["quality"]]  # both have keys of 6 bits and values of 4
    return made


def vllm_identical(results):
    """The number of prompts for which a cache gives the greedy tokens of vLLM's own cache."""
    rows = []
    for cache in dict.fromkeys(line["cache"] for line in results.lines("vllm_ids.csv")):
        line = results.newest("vllm_ids.csv", {"cache": cache})
        rows.append([cache, line["beside"], line["dtype"], line["equal"], line["prompts"]])
    return table(["cache", "compared with", "dtype", "equal", "of prompts"], *rows)


def vllm_versions(results):
    """The releases of vLLM that kvant was run with, and what was run."""
    rows = (
        [line["vllm"], line["device"], line["run"], line["result"]]
        for line in results.lines("vllm_versions.csv")
    )
    return table(["vLLM", "on", "run", "result"], *rows)


def vllm_first_layer(results):
    """KLD of turboquant-4 by the layers whose keys are int-8, on three models without a
    calibration."""
    file, rows = "vllm_first_layer.csv", []
    for layers in ("none", "first", "last", "first and last"):
        wanted = {"k": "turboquant-4", "v": "turboquant-4", "int-8 keys": layers}
        lines = [results.maybe(file, {**wanted, "model": starts(m)}) for m in MODELS]
        bits = next((f"{line.number('bits'):.2f}" for line in lines if line), "")
        rows.append([layers, bits, *divergence_cells(lines)])
    heading = [
        "layers with `int-8` keys",
        "bits, SmolLM2-135M",
        *(f"KLD, {n}" for n in MODELS.values()),
    ]
    return table(heading, *rows)
