"""vLLM: tokens per second of a request against tokens per second of all requests."""

import serving
from draw import WIDTH, Canvas, Scale

LEFT, RIGHT, TOP, BOTTOM, INPUT = 62, WIDTH - 24, 92, 330, 8192
SHOWN = ("auto", "fp8", "int4", "bdr4", "kvant")
ACROSS, UP = (50, 100, 200, 400, 800, 1600), (25, 50, 100, 200)


def _points(results, cache):
    """{requests at once: (tokens per second of all, of a request)}"""
    found = {}
    for n in serving.AT_ONCE:
        line = serving.line(results, cache, "served", n, INPUT, "tps_system")
        if line:
            found[n] = line.number("tps_system"), line.number("tps_request")
    return found


def draw(theme, results):
    lines = {cache: found for cache in SHOWN if (found := _points(results, cache))}
    canvas = Canvas(theme, BOTTOM + 104 + 26 * len(lines), "Speed of a request and of all in vLLM")
    canvas.text(16, 30, "What a request keeps when others run", size=20, bold=True)
    canvas.text(16, 58, "tokens per second of a request, after its first token", "soft")
    points = [point for found in lines.values() for point in found.values()]
    xs, ys = zip(*points)
    right = Scale((0.9 * min(xs), 1.1 * max(xs)), (LEFT, RIGHT), log=True)
    up = Scale((0.9 * min(ys), 1.1 * max(ys)), (BOTTOM, TOP), log=True)
    for tick in (x for x in UP if min(ys) <= x <= max(ys)):
        canvas.path([(LEFT, up(tick)), (RIGHT, up(tick))])
        canvas.text(LEFT - 8, up(tick) + 6, str(tick), "soft", "end")
    for tick in (x for x in ACROSS if min(xs) <= x <= max(xs)):
        canvas.path([(right(tick), BOTTOM), (right(tick), TOP)])
        canvas.text(right(tick), BOTTOM + 22, f"{tick:,}", "soft", "middle")
    words = "tokens per second of all requests"
    canvas.text((LEFT + RIGHT) / 2, BOTTOM + 44, words, "soft", "middle")
    for row, (cache, found) in enumerate(lines.items()):
        number, name = serving.NUMBERS[cache], serving.NAMES[cache].strip("`")
        points = [(right(x), up(z)) for x, z in found.values()]
        canvas.series(number, name, points, BOTTOM + 76 + 26 * row)
    note = f"prompts of {INPUT:,} tokens; more requests from left to right"
    canvas.text(16, BOTTOM + 82 + 26 * len(lines), note, "soft")
    return canvas
