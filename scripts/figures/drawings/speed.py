"""Decode speed of the default relative to f16, against the tokens in the cache."""

import caches
import speed
from draw import WIDTH, Canvas, Scale

LEFT, RIGHT, TOP, BOTTOM = 56, WIDTH - 20, 92, 330
COLUMNS = (0, 512, 4096, 32768, 131072)
CPU_SPEED = "decode_tps"
TICKS = (0.5, 1, 2, 3)


def _lines(results):
    """(name, {depth: ratio}) of each machine. A GPU's run has the depths of the tables only."""
    for name in speed.cpus(results):
        pairs = {d: speed.cpu_pair(results, "balanced", name, d, CPU_SPEED) for d in COLUMNS}
        found = {d: speed.ratio(pair, CPU_SPEED) for d, pair in pairs.items() if pair}
        if found:
            yield name, found
    for gpu, names in speed.gpus(results).items():
        pairs = {
            d: speed.gpu_pair(results, "balanced", names, speed.DECODE, d) for d in speed.COLUMNS
        }
        found = {d: speed.ratio(pair, "tokens/s") for d, pair in pairs.items() if pair}
        yield f"NVIDIA {gpu}", found


def draw(theme, results):
    lines = list(_lines(results))
    canvas = Canvas(theme, BOTTOM + 104 + 26 * len(lines), "Decode speed of kvant relative to f16")
    canvas.text(16, 30, "Faster at long contexts, slower at short", size=20, bold=True)
    canvas.text(16, 58, "speed of balanced divided by that of the f16 cache", "soft")
    up = Scale((0.45, 3.6), (BOTTOM, TOP), log=True)
    across = dict(zip(COLUMNS, (LEFT + 20 + i * (RIGHT - LEFT - 40) / 4 for i in range(5))))
    canvas.ratios(TICKS, up, LEFT, RIGHT)
    canvas.text(RIGHT, up(1) + 20, "as fast as f16", "soft", "end")
    for depth, x in across.items():
        canvas.text(x, BOTTOM + 22, caches.context_name(depth), "soft", "middle")
    canvas.text((LEFT + RIGHT) / 2, BOTTOM + 44, "tokens in the cache", "soft", "middle")
    for number, (name, found) in enumerate(lines):
        points = [(across[depth], up(ratio)) for depth, ratio in found.items()]
        canvas.series(number, name, points, BOTTOM + 76 + 26 * number)
    note = f"CPUs: the shape of {speed.CPU_MODEL}. GPUs: that of an 8B model."
    canvas.text(16, BOTTOM + 82 + 26 * len(lines), note, "soft")
    return canvas
