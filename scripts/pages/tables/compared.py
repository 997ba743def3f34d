"""Caches of other programs next to kvant: quality, bits, speed, and greedy answers."""

from caches import MODELS
from text import code, divergence, table, times

FILE, SPEED, ANSWERS = "rivals.csv", "rivals_speed.csv", "generate.csv"
BUDGETS = (8.5, 7.5, 6.5, 5.5, 4.5, 3.5, 2.5)


def _name(program, cache):
    """A cache on the page: ik_llama.cpp `q8_KV`."""
    kind, _, rest = cache.partition(", ")
    return f"{program} {code(kind)}" + (f", {rest}" if rest else "")


def _newest(results, length, model):
    """{(program, cache): its newest line} at a length."""
    found = {}
    for line in results.lines(FILE, {"length": length, "model": model}):
        found.setdefault((line["program"], line["cache"]), []).append(line)
    return {key: results.take(lines) for key, lines in found.items()}


def _quality(results, length):
    rows = []
    for model, name in MODELS.items():
        lines = _newest(results, length, model).values()
        for line in sorted(lines, key=lambda x: -x.number("bits")):
            rows.append(
                [
                    name,
                    _name(line["program"], line["cache"]),
                    f"{line.number('bits'):.2f}",
                    divergence(line.number("kld_mean")),
                    divergence(line.number("kld_se")),
                    divergence(line.number("kld_p99")),
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


def _best(lines, budget):
    """The line with the lowest KLD among those that need at most `budget` bits."""
    fitting = [line for line in lines if line.number("bits") <= budget]
    return min(fitting, key=lambda line: line.number("kld_mean"), default=None)


def _cells(line):
    if line is None:
        return ["", ""]
    name = (
        code(line["cache"]) if line["program"] == "kvant" else _name(line["program"], line["cache"])
    )
    return [name, divergence(line.number("kld_mean"))]


def compared_budget(results):
    """The lowest KLD that kvant and other programs reach within a budget of bits per number."""
    rows = []
    for length in (2048, 8192):
        for model, name in MODELS.items():
            lines = list(_newest(results, length, model).values())
            ours = [line for line in lines if line["program"] == "kvant"]
            others = [line for line in lines if line["program"] != "kvant"]
            for budget in BUDGETS if lines else ():
                pair = _best(ours, budget), _best(others, budget)
                if any(pair):
                    cells = _cells(pair[0]) + _cells(pair[1])
                    rows.append([f"{length:,}", name, f"{budget:g}", *cells])
    heading = ["tokens", "model", "bits at most", "kvant", "KLD of kvant"]
    return table([*heading, "best other", "KLD of the other"], *rows)


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
        cells = [MODELS.get(model, model), _name(program, cache)]
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
    for lines in found.values():
        line = results.take(lines)
        kind, _, cache = line["cache"].rpartition(":")
        quarters = [divergence(line.number(f"kld_quarter_{i}")) for i in (1, 2, 3, 4)]
        rows.append(
            [
                _name(kind or "llama.cpp", cache),
                f"{line.number('ppl'):.2f}",
                f"{line.number('ppl_low'):.2f} to {line.number('ppl_high'):.2f}",
                divergence(line.number("kld")),
                f"{divergence(line.number('kld_low'))} to {divergence(line.number('kld_high'))}",
                quarters[0],
                quarters[3],
                f"{line['loops']} of {line['prompts']}",
            ]
        )
    heading = ["cache", "perplexity of the answers", "95 % interval", "KLD", "95 % interval"]
    heading += ["KLD, first quarter", "KLD, last quarter", "answers that loop"]
    return table(heading, *rows)
