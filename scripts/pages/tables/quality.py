"""Quality of presets and of llama.cpp's caches: mean KL divergence from the f16 cache."""

from caches import (
    BY_SIZE,
    GIB,
    MIB,
    MODELS,
    PRESETS,
    TEXT,
    label,
    memory,
    memory_on_gpu,
    quality,
    state,
)
from results import has, starts
from text import code, divergence, table


def _klds(results, cache):
    return [divergence(quality(results, model, cache).number("kld_mean")) for model in MODELS]


def quality_and_memory(results):
    """README's table: size of an 8B model's cache at 32k on a CPU and on a GPU (computed), of its
    saved state (measured), and KLD on three models."""
    rows = [
        [
            label(cache),
            f"{memory(results, 'Llama 3.1 8B', cache, 32768) / GIB:.1f} GiB",
            f"{memory_on_gpu(results, 'Llama-3.1-8B', cache, 32768) / GIB:.1f} GiB",
            f"{state(results, cache).number('bytes') / GIB:.1f} GiB",
        ]
        + (["0"] * len(MODELS) if cache == "f16" else _klds(results, cache))
        for cache in BY_SIZE
        if cache != "tiny"
    ]
    heading = ["KV cache", "on a CPU", "on a GPU", "in a file"]
    heading += [f"KLD, {model}" for model in MODELS.values()]
    return table(heading, *rows)


def quality_details(results):
    """KLD with its standard error, the share of equal first choices, and perplexity, per preset."""
    rows = []
    for model, name in MODELS.items():
        for cache in BY_SIZE:
            line = quality(results, model, cache)
            rows.append(
                [
                    name,
                    label(cache),
                    divergence(line.number("kld_mean")),
                    divergence(line.number("kld_se")),
                    f"{100 * line.number('top1'):.1f}",
                    f"{line.number('ppl'):.2f}",
                ]
            )
    return table(["model", "KV cache", "KLD", "±", "same first choice, %", "perplexity"], *rows)


def calibration_effect(results):
    """KLD and memory of presets that learned, and of calibrated ones, on SmolLM2."""
    model, rows = "SmolLM2-135M", []
    for preset in PRESETS[:3]:  # tiny always learns
        wanted = {"model": model, "preset": preset, "calibration": has("kvcal"), **TEXT}
        ways = (quality(results, model, preset), results.newest("quality_presets.csv", wanted))
        klds = [divergence(line.number("kld_mean")) for line in ways]
        sizes = [f"{line.number('kv_bytes') / MIB:.1f}" for line in ways]
        rows.append([label(preset), *klds, *sizes])
    heading = ["KV cache", "KLD, learned", "KLD, calibrated", "MiB, learned", "MiB, calibrated"]
    return table(heading, *rows)


def _codec(results, model, keys, values):
    wanted = {"model": starts(model), "cache": "kvant", "k": keys, "v": values, "protect": "0"}
    return results.maybe("quality.csv", {**wanted, "calibration": ""})


def quality_codecs(results):
    """KLD of codecs without calibration on three models; an empty cell was not measured."""
    pairs = [
        ("trellis-4:center=first,norm=first", "trellis-4:center=first"),
        ("int-4:axis=channel,group=64", "trellis-4"),
        ("int-4:axis=channel,group=64", "turboquant-4"),
        ("int-8", "int-8"),
        *(
            (spec, spec)
            for spec in (
                "turboquant-5",
                "turboquant-4",
                "octopus-4",
                "bdr-4",
                "int-4",
                "innerq-base",
                "kivi-4",
                "kivi-2",
                "polar-4",
                "hqmq-s96r4",
            )
        ),
    ]
    rows = []
    for keys, values in pairs:
        lines = [_codec(results, model, keys, values) for model in MODELS]
        if any(lines):
            cells = [divergence(line.number("kld_mean")) if line else "" for line in lines]
            rows.append([code(keys), "" if values == keys else code(values), *cells])
    heading = ["keys", "values, if different", *(f"KLD, {name}" for name in MODELS.values())]
    return table(heading, *rows)


def quality_transformers(results):
    """KLD of presets in transformers (kvant.evaluate) next to kvant eval, SmolLM2 in float32."""
    rows = []
    for preset in PRESETS[:3]:
        wanted = {"cache": preset, "from": "1024", "to": "2046"}
        tools = ("kvant.evaluate", "kvant.evaluate on the GPU", "kvant eval")
        lines = [results.maybe("quality_transformers.csv", {**wanted, "tool": t}) for t in tools]
        rows.append([code(preset), *(divergence(x.number("kld_mean")) if x else "" for x in lines)])
    heading = ["preset", "`kvant.evaluate`, CPU", "`kvant.evaluate`, GPU", "`kvant eval`, CPU"]
    return table(heading, *rows)
