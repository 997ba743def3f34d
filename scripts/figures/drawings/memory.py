"""Bits per number of an 8B model's caches against the context, with everything counted."""

import caches
from draw import WIDTH, Canvas, Scale

MODEL = "Llama 3.1 8B"
LEFT, RIGHT, TOP, BOTTOM = 52, WIDTH - 32, 92, 350
CACHES = {
    "q8_0": ("stock", "6 5"),
    "q4_0": ("stock", "2 4"),
    "quality": ("b", ""),
    "balanced": ("a", ""),
    "small": ("d", ""),
}
NOTES = (
    "Computed for an 8B model on a CPU. Each step is a",
    "transform that kvant learns for later positions.",
)
MOST = 24


def draw(theme, results):
    canvas = Canvas(theme, BOTTOM + 178, "Bits per number of key-value caches against the context")
    canvas.text(16, 30, "Short contexts save less", size=20, bold=True)
    canvas.text(16, 58, "bits per number, everything counted", "soft")
    lines = results.lines("sizes.csv", {"model": MODEL, "cache": "f16"})
    contexts = sorted(int(line["context"]) for line in lines)
    across = Scale((contexts[0], contexts[-1]), (LEFT, RIGHT), log=True)
    up = Scale((0, MOST), (BOTTOM, TOP))
    for tick in range(0, MOST + 1, 4):
        canvas.path([(LEFT, up(tick)), (RIGHT, up(tick))], "soft" if tick == 16 else "grid")
        canvas.text(LEFT - 8, up(tick) + 6, str(tick), "soft", "end")
    canvas.text(RIGHT, up(16) - 8, "f16", "soft", "end")
    for context in (512, 2048, 8192, 32768, 131072):
        canvas.text(across(context), BOTTOM + 22, caches.context_name(context), "soft", "middle")
    canvas.text((LEFT + RIGHT) / 2, BOTTOM + 44, "tokens in the cache", "soft", "middle")
    for number, (cache, (color, dashes)) in enumerate(CACHES.items()):
        points = [(n, caches.bits(results, MODEL, cache, n)) for n in contexts]
        canvas.path([(across(n), up(b)) for n, b in points if b <= MOST], color, 2.5, dashes)
        x, y = 28 + 165 * (number % 3), BOTTOM + 80 + 26 * (number // 3)
        canvas.path([(x - 12, y - 5), (x + 16, y - 5)], color, 2.5, dashes)
        canvas.text(x + 24, y, cache, "soft")
    for number, line in enumerate(NOTES):
        canvas.text(16, BOTTOM + 140 + 24 * number, line, "soft")
    return canvas
