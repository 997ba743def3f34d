"""Requests that run at once in vLLM, in Qwen3 8B's shape, with the same memory for every cache."""

from serving import AT_ONCE, FILE, NAMES, RIVAL, line, pair
from text import table, thousands, times

INPUTS = (256, 8192, 16384)
# SAW-INT4, appendix D: percent by which INT4's tokens per second of all requests exceed BF16's.
SAW = {(256, 128): 13.5, (16384, 16): 18.7, (16384, 64): 41.4}


def _by_load(results, column, text):
    """A row per prompt length and number of requests: bfloat16's number, and other caches' numbers
    divided by bfloat16's of the same run. Caches that were not measured have no column."""
    caches = [cache for cache in NAMES if results.lines(FILE, {"cache": cache})]
    rows = []
    for input in INPUTS:
        for at_once in AT_ONCE:
            shape = "served", at_once, input, column
            stock = line(results, RIVAL, *shape)
            pairs = [pair(results, cache, *shape) for cache in caches if cache != RIVAL]
            if stock:
                cells = [x and times(x[0].number(column) / x[1].number(column)) for x in pairs]
                rows.append([thousands(input), at_once, text(stock.number(column)), *cells])
    return table(["tokens of a prompt", "requests at once", *map(NAMES.get, caches)], *rows)


def serving_system(results):
    """Output tokens per second of all requests, by prompt length and requests at once."""
    return _by_load(results, "tps_system", thousands)


def serving_request(results):
    """Output tokens per second of a request after its first token."""
    return _by_load(results, "tps_request", lambda x: f"{x:.0f}")


def serving_first_token(results):
    """Mean seconds until the first token of a request."""
    return _by_load(results, "ttft_ms", lambda x: f"{x / 1e3:.2f}")


def serving_http(results):
    """`vllm bench serve` against `vllm serve`, as times of bfloat16; above 1 is faster. Tokens per
    second of all requests, and the wait for a first token."""
    shapes = ((1, 8192), (16, 8192), (64, 8192), (64, 1024))
    rows = []
    for at_once, input in shapes:
        stock = line(results, RIVAL, "http", at_once, input, "tps_system")
        cells = [thousands(stock.number("tps_system"))]
        for cache in ("fp8", "kvant", "fast"):
            for column in ("tps_system", "ttft_ms"):
                both = pair(results, cache, "http", at_once, input, column)
                ratio = both and both[0].number(column) / both[1].number(column)
                cells.append(both and times(ratio if column == "tps_system" else 1 / ratio))
        rows.append([thousands(input), at_once, *cells])
    heading = ["tokens of a prompt", "requests at once", NAMES[RIVAL]]
    for cache in ("fp8", "kvant", "fast"):
        heading += [NAMES[cache], f"first token, {NAMES[cache]}"]
    return table(heading, *rows)


def serving_goals(results):
    """Steps over filled contexts and the wait for one prompt, as times of bfloat16 in the same
    run; above 1 is faster. And the tokens that fit."""
    columns = {
        "speed, 1 x 1,024": ("filled", 1, 1024, "tpot_ms"),
        "speed, 64 x 4,096": ("filled", 64, 4096, "tpot_ms"),
        "speed, 8 x 32,768": ("filled", 8, 32768, "tpot_ms"),
        "speed of a prompt of 8,192": ("prompt", 1, 8192, "ttft_ms"),
    }
    rows = []
    for cache, name in NAMES.items():
        found = [(pair(results, cache, *of), of[-1]) for of in columns.values()]
        if any(x for x, _ in found):
            first = next(x for x, _ in found if x)
            fit = first[0].number("tokens_that_fit")
            cells = [x and times(x[1].number(column) / x[0].number(column)) for x, column in found]
            rows.append([name, thousands(fit), *cells])
    return table(["KV cache", "tokens that fit", *columns], *rows)


def serving_gain(results):
    """Decode speed of balanced relative to bfloat16: 8 requests of 32,768 tokens, an H200."""
    ours, rival = pair(results, "kvant", "filled", 8, 32768, "tpot_ms")
    return times(rival.number("tpot_ms") / ours.number("tpot_ms"))


def serving_fit(results):
    """How many times as many tokens fit with balanced as with bfloat16."""
    ours, rival = pair(results, "kvant", "filled", 64, 4096, "tpot_ms")
    return f"{ours.number('tokens_that_fit') / rival.number('tokens_that_fit'):.1f}"


def papers_serving(results):
    """SAW-INT4's tokens per second of all requests, in percent more than BF16's, and BDR's in
    percent more than INT4's."""
    rows = []
    for (input, at_once), of_paper in SAW.items():
        plain, rotated = (
            pair(results, cache, "served", at_once, input, "tps_system")
            for cache in ("int4", "bdr4")
        )
        of = [x.number("tps_system") for x in (*plain, rotated[0])]
        cells = (f"{100 * (x - 1):+.1f}" for x in (of[0] / of[1], of[2] / of[0]))
        rows.append([thousands(input), at_once, f"+{of_paper}", *cells])
    heading = ["INT4, paper (H100)", "`int4` (H200)", "`bdr4` compared with `int4`"]
    return table(["tokens of a prompt", "requests at once", *heading], *rows)
