"""A row per cache by size, with its divergence from f16 on three models."""

import caches
from draw import WIDTH, Canvas, Scale
from text import size

CACHES = ("q8_0", "quality", "balanced", "q4_0", "small")
MODEL, CONTEXT = "Llama 3.1 8B", 32768
TOP, ROW, LEFT, RIGHT = 92, 50, 176, WIDTH - 24
TICKS = (0.003, 0.01, 0.03, 0.1, 0.3, 1)


def draw(theme, results):
    bottom = TOP + ROW * len(CACHES)
    canvas = Canvas(
        theme, bottom + 150, "Size of key-value caches and what they lose on three models"
    )
    canvas.text(16, 30, "What a smaller cache loses", size=20, bold=True)
    canvas.text(16, 58, "mean KL divergence from the f16 cache (less is better)", "soft")
    place = Scale((0.0025, 1.2), (LEFT, RIGHT), log=True)
    for tick in TICKS:
        canvas.path([(place(tick), TOP - 12), (place(tick), bottom)])
        canvas.text(place(tick), bottom + 22, f"{tick:g}", "soft", "middle")
    for number, cache in enumerate(CACHES):
        _row(canvas, results, cache, TOP + ROW * number + ROW // 2 - 4, place)
    for number, name in enumerate(caches.MODELS.values()):
        x, y = 28 + 158 * number, bottom + 54
        canvas.mark(number, x, y, "soft")
        canvas.text(x + 14, y + 6, name, "soft")
    full = size(caches.memory(results, MODEL, "f16", CONTEXT))
    notes = (
        "Sizes are computed for an 8B model with 32k tokens.",
        f"f16 takes {full}. Nothing is calibrated.",
    )
    for number, line in enumerate(notes):
        canvas.text(16, bottom + 96 + 24 * number, line, "soft")
    return canvas


def _row(canvas, results, cache, y, place):
    color = "stock" if cache in caches.STOCK else "ours"
    canvas.text(
        16, y - 3, ("llama.cpp " if color == "stock" else "kvant ") + cache, color, bold=True
    )
    canvas.text(16, y + 17, size(caches.memory(results, MODEL, cache, CONTEXT)))
    found = [caches.quality(results, model, cache).number("kld_mean") for model in caches.MODELS]
    canvas.path([(place(min(found)), y), (place(max(found)), y)], color, 2)
    for number, value in enumerate(found):
        canvas.mark(number, place(value), y, color)
