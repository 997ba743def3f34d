"""Caches of other programs next to kvant: quality, bits, speed, greedy answers, and what their
ideas are worth inside kvant."""

import math

from caches import MODELS as SMALL
from rivals import FILE, MODELS, cache_name, newest, on_gpu
from text import code, divergence, significant, table, times

SPEED, ANSWERS, TASKS = "rivals_speed.csv", "generate.csv", "tasks.csv"
SHORT, IDEAS, PREDICTED = "rivals_short.csv", "rivals_ideas.csv", "rivals_predicted.csv"
KLD = ("kld_mean", "kld_se")
ASKED = ("f16", "q8_0", "kvant:quality", "kvant:balanced", "kvant:small", "kvant:tiny", "q4_0")
TASK_NAMES = {"needle": "facts", "tools": "tool calls", "arithmetic": "word problems"}
ANSWERED = {"SmolLM2-135M": "SmolLM2-135M", "Qwen2.5-Coder-0.5B-20k": "Qwen2.5-0.5B"}
LENGTHS = (2048, 8192, 32768)
BUDGETS = (8.5, 6.5, 5.5, 4.5, 3.5, 2.5)


def _name(program, cache):
    """A cache on the page: ik_llama.cpp `q8_KV`."""
    kind, _, rest = cache.partition(", ")
    return f"{program} {code(kind)}" + (f", {rest}" if rest else "")


def _line_name(line):
    return _name(line["program"], cache_name(line))


def _quality(results, length):
    rows = []
    for name in MODELS[length]:
        lines = newest(results, length, name).values()
        for line in sorted(lines, key=lambda x: -x.number("bits")):
            rows.append(
                [
                    name,
                    _line_name(line),
                    f"{line.number('bits'):.2f}",
                    significant(line.number("kld_mean")),
                    significant(line.number("kld_se"), 2),
                    significant(line.number("kld_p99")),
                    f"{100 * line.number('top1'):.1f}",
                ]
            )
    heading = ["model", "cache", "bits", "KLD", "±", "KLD, 99 %", "same first choice, %"]
    return table(heading, *rows)


def compared_2k(results):
    """Caches of other programs and kvant's at 2048 tokens, largest first: bits and KLD to f16."""
    return _quality(results, 2048)


def compared_8k(results):
    """The same at 8192 tokens."""
    return _quality(results, 8192)


def compared_32k(results):
    """The same at 32,768 tokens."""
    return _quality(results, 32768)


def compared_noise(results):
    """KLD of an exact cache and of caches of 8 bits, with weights of 4 bits, at 2,048 tokens."""
    caches = ("exact", "kvant"), ("q8_0", "llama.cpp"), ("quality", "kvant")
    rows = []
    for model, name in SMALL.items():
        cells = [name]
        for cache, program in caches:
            wanted = {"model": model, "length": 2048, "program": program, "cache": cache}
            line = results.newest(FILE, wanted)
            cells += [significant(line.number("kld_mean")), significant(line.number("kld_se"), 2)]
        rows.append(cells)
    heading = ["model", "exact", "±", "llama.cpp `q8_0`", "±", "kvant `quality`", "±"]
    return table(heading, *rows)


def _best(lines, budget):
    """The line with the lowest KLD among those that need at most `budget` bits."""
    fitting = [line for line in lines if line.number("bits") <= budget]
    return min(fitting, key=lambda line: line.number("kld_mean"), default=None)


def _cells(line):
    if line is None:
        return ["", ""]
    name = _line_name(line).removeprefix("kvant ")
    return [name, significant(line.number("kld_mean"))]


def _leaders(lines, budget):
    """The cache with the lowest KLD within the budget. The best cache of another program follows
    when it loses as much within two standard errors."""
    best = _best(lines, budget)
    if best is None:
        return ""
    rival = _best([line for line in lines if line["program"] != best["program"]], budget)
    found = [best]
    if rival:
        error = math.hypot(best.number("kld_se"), rival.number("kld_se"))
        if rival.number("kld_mean") - best.number("kld_mean") <= 2 * error:
            found.append(rival)
    return ", ".join(map(_line_name, found))


def compared_leaders(results):
    """The cache that loses least within a budget of bits, by length and model."""
    rows = []
    for length in LENGTHS:
        for name in MODELS[length]:
            lines = list(newest(results, length, name).values())
            if lines:
                cells = [_leaders(lines, budget) for budget in BUDGETS]
                rows.append([f"{length:,}", name, *cells])
    columns = [f"at most {budget:g} bits" for budget in BUDGETS]
    return table(["tokens", "model", *columns], *rows)


def _budgets(results, fits):
    """The lowest KLD that kvant and other programs reach within a budget of bits per number."""
    rows = []
    for length in LENGTHS:
        for name in MODELS[length]:
            lines = list(newest(results, length, name, fits).values())
            ours = [line for line in lines if line["program"] == "kvant"]
            others = [line for line in lines if line["program"] != "kvant"]
            for budget in BUDGETS if ours else ():
                pair = _best(ours, budget), _best(others, budget)
                if any(pair):
                    cells = _cells(pair[0]) + _cells(pair[1])
                    rows.append([f"{length:,}", name, f"{budget:g}", *cells])
    heading = ["tokens", "model", "bits at most", "kvant", "KLD of kvant"]
    return table([*heading, "best other", "KLD of the other"], *rows)


def compared_budget(results):
    """The lowest KLD of kvant and of other programs within a budget of bits per number."""
    return _budgets(results, lambda line: True)


def compared_gpu(results):
    """The same on a GPU alone."""
    return _budgets(results, on_gpu)


def compared_speed(results):
    """Speed relative to the f16 cache of the same program, by tokens in the cache."""
    found = {}
    if not (results.folder / SPEED).exists():
        return ["Not measured yet: timed runs need an idle machine."]
    for line in results.lines(SPEED):
        key = (line["program"], line["cache"], line["model"], line["depth"])
        found.setdefault(key, []).append(line)
    newest = {key: results.take(lines) for key, lines in found.items()}
    depths = sorted({int(depth) for *_, depth in newest})
    rows = []
    for program, cache, model in dict.fromkeys(key[:3] for key in newest):
        host = "llama.cpp" if program == "kvant" else program
        cells = [SMALL.get(model, model), _name(program, cache)]
        for way in ("decode_tps", "prefill_tps"):
            for depth in depths:
                ours = newest.get((program, cache, model, str(depth)))
                f16 = newest.get((host, "f16", model, str(depth)))
                pair = ours and f16
                cells.append(times(ours.number(way) / f16.number(way)) if pair else "")
        if cache != "f16":
            rows.append(cells)
    columns = [f"{way}, {depth:,}" for way in ("decode", "prompt") for depth in depths]
    return table(["model", "cache", *columns], *rows)


def compared_answers(results):
    """Greedy answers of caches: their perplexity by f16, divergence by quarter, and loops."""
    found = {}
    for line in results.lines(ANSWERS):
        found.setdefault((line["model"], line["cache"]), []).append(line)
    rows = []
    for (model, _), lines in sorted(found.items(), key=lambda x: list(ANSWERED).index(x[0][0])):
        line = results.take(lines)
        kind, _, cache = line["cache"].rpartition(":")
        quarters = [divergence(line.number(f"kld_quarter_{i}")) for i in (1, 2, 3, 4)]
        rows.append(
            [
                ANSWERED[model],
                _name(kind or "llama.cpp", cache),
                f"{int(line['tokens']):,}",
                f"{line.number('ppl'):.2f}",
                f"{line.number('ppl_low'):.2f} to {line.number('ppl_high'):.2f}",
                divergence(line.number("kld")),
                f"{divergence(line.number('kld_low'))} to {divergence(line.number('kld_high'))}",
                quarters[0],
                quarters[3],
                f"{line['loops']} of {line['prompts']}",
            ]
        )
    heading = [
        "model",
        "cache",
        "tokens",
        "perplexity of the answers",
        "95 % interval",
        "KLD",
        "95 % interval",
    ]
    heading += ["KLD, first quarter", "KLD, last quarter", "answers that loop"]
    return table(heading, *rows)


def _percent(share):
    return f"{100 * share:.0f}"


def _task_order(key):
    task, tokens, cache = key
    return list(TASK_NAMES).index(task), tokens, ASKED.index(cache)


def compared_tasks(results):
    """Tasks after long prompts: right answers of each cache, and answers that f16 gives, too."""
    found = {}
    for line in results.lines(TASKS):
        found.setdefault((line["task"], int(line["tokens"]), line["cache"]), []).append(line)
    rows = []
    for task, tokens, cache in sorted(found, key=_task_order):
        line = results.take(found[task, tokens, cache])
        kind, _, cache = cache.rpartition(":")
        asked = int(line["questions"])
        rows.append(
            [
                TASK_NAMES[task],
                f"{tokens:,}",
                _name(kind or "llama.cpp", cache),
                *(_percent(int(line[what]) / asked) for what in ("valid", "right")),
                f"{_percent(line.number('right_low'))} to {_percent(line.number('right_high'))}",
                _percent(int(line["equal"]) / asked),
            ]
        )
    heading = ["task", "tokens", "cache", "valid, %", "right, %", "95 % interval"]
    return table([*heading, "as f16, %"], *rows)


def compared_short(results):
    """Three and two exact pages in 2048 tokens: bits and KLD by tokens of a batch."""
    rows = []
    for preset in ("small", "tiny"):
        for pages in ("three pages", "two pages"):
            setting = {"model": "SmolLM2-135M", "setting": f"{preset}, {pages}"}
            lines = [results.newest(SHORT, {**setting, "batch": batch}) for batch in ("100", "8")]
            errors = [[divergence(line.number(key)) for key in KLD] for line in lines]
            cells = [" ± ".join(pair) for pair in errors]
            bits = [f"{line.number('bits'):.2f}" for line in lines]
            rows.append([f"{code(preset)}, {pages}", cells[0], bits[0], cells[1], bits[1]])
    return table(["cache", "KLD, batches of 100", "bits", "KLD, batches of 8", "bits"], *rows)


_IDEAS = {
    "trellis-3, W, 4 bits": "W in 4 bits instead of 16",
    "trellis-2, predicted, later tokens": "predicted from the layer below, 2 bits (AQUA-KV)",
    "trellis-3, predicted, later tokens": "predicted from the layer below, 3 bits",
    "trellis-3, predicted by another text's map, later tokens": "the same, 3 bits, by a map that "
    "was learned on another text",
    "trellis-3, entropy coded": "entropy coding per channel, 3 bits (KVTC)",
    "trellis-3, evened, half": "evened variances, half, 3 bits (KVarN)",
    "trellis-3, evened, whole": "evened variances, whole, 3 bits (KVarN)",
    "trellis-3, by head": "bits by head, 3 bits on average (RateQuant)",
    "trellis-2, resealed from 4": "sealed again from 4 to 2 bits (buun-llama-cpp)",
    "trellis-3, resealed from 4": "sealed again from 4 to 3 bits",
    "trellis-2, resealed from 4, 3": "sealed again from 4 to 3 to 2 bits",
    "exllamav3, 2 bits": "exllamav3's own kernels, 2 bits",
    "exllamav3, 3 bits": "exllamav3's own kernels, 3 bits",
    "exllamav3, 4 bits": "exllamav3's own kernels, 4 bits",
}


def compared_ideas(results):
    """Errors of keys and values with ideas of other programs, relative to trellis at equal bits."""
    rows = []
    for idea, words in _IDEAS.items():
        cells = [words]
        for role in "kv":
            for model in SMALL:
                line = results.maybe(IDEAS, {"model": model, "role": role, "idea": idea})
                # The same bits are dealt otherwise, so the mean of logarithms does not change.
                ratio = "means" if "by head" in idea else "geometric"
                cells.append("" if line is None else f"{line.number(ratio):.2f}")
        if any(cells[1:]):
            rows.append(cells)
    columns = [f"{role}, {name}" for role in ("keys", "values") for name in SMALL.values()]
    return table(["idea", *columns], *rows)


def compared_predicted(results):
    """KLD of codecs of 2 and 3 bits with and without prediction from the layer below."""
    rows = []
    for model, name in SMALL.items():
        for bits in (2, 3):
            lines = [
                results.maybe(PREDICTED, {"model": model, "codec": f"trellis-{bits}{end}"})
                for end in ("", ", predicted")
            ]
            if all(lines):
                cells = [divergence(line.number(key)) for line in lines for key in KLD]
                rows.append([name, bits, *cells])
    return table(["model", "bits of codes", "KLD", "±", "KLD, predicted", "±"], *rows)
