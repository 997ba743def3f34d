"""vLLM: tokens per second of all requests relative to bfloat16, against the requests at once."""

import serving
from draw import WIDTH, Canvas, Scale

LEFT, RIGHT, TOP, BOTTOM, INPUT = 56, WIDTH - 20, 92, 330, 8192


def draw(theme, results):
    lines = {}
    for cache in serving.NAMES:
        pairs = {
            n: serving.pair(results, cache, "served", n, INPUT, "tps_system")
            for n in serving.AT_ONCE
        }
        found = {
            n: x[0].number("tps_system") / x[1].number("tps_system") for n, x in pairs.items() if x
        }
        if len(found) > 1 and cache != serving.RIVAL:  # a line has two points
            lines[cache] = found
    used = sorted({n for found in lines.values() for n in found})
    most = max(max(found.values()) for found in lines.values())
    canvas = Canvas(theme, BOTTOM + 104 + 26 * len(lines), "Tokens per second in vLLM")
    canvas.text(16, 30, "Many long prompts gain the most", size=20, bold=True)
    canvas.text(16, 58, "all requests' tokens per second divided by bfloat16's", "soft")
    up = Scale((0.7, max(1.5, 1.1 * most)), (BOTTOM, TOP), log=True)
    step = (RIGHT - LEFT - 40) / max(1, len(used) - 1)
    across = {n: LEFT + 20 + i * step for i, n in enumerate(used)}
    ticks = [x for x in (0.75, 1, 1.25, 1.5, 2, 3) if x <= max(1.5, 1.1 * most)]
    canvas.ratios(ticks, up, LEFT, RIGHT)
    for n, x in across.items():
        canvas.text(x, BOTTOM + 22, str(n), "soft", "middle")
    canvas.text((LEFT + RIGHT) / 2, BOTTOM + 44, "requests at once", "soft", "middle")
    for row, (cache, found) in enumerate(lines.items()):
        number, name = serving.NUMBERS[cache], serving.NAMES[cache].strip("`")
        points = [(across[n], up(x)) for n, x in found.items()]
        canvas.series(number, name, points, BOTTOM + 76 + 26 * row)
    note = f"prompts of {INPUT:,} tokens, Qwen3 8B's shape, equal memory"
    canvas.text(16, BOTTOM + 82 + 26 * len(lines), note, "soft")
    return canvas
