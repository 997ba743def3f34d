"""Caches of several programs: what each loses against the bits that it takes, on three models."""

from draw import WIDTH, Canvas, Scale
from rivals import newest

LENGTH = 2048
LEFT, RIGHT, TOP, PANEL, GAP = 76, WIDTH - 20, 124, 240, 64
MODELS = ("SmolLM2-135M", "Qwen2.5-0.5B", "Gemma-3-270M")
COLORS = {
    "kvant": "ours",
    "llama.cpp": "stock",
    "ik_llama.cpp": "b",
    "llama-cpp-turboquant": "d",
    "transformers": "e",
    "buun-llama-cpp": "c",
}
KLDS, BITS = (0.0001, 0.001, 0.01, 0.1, 1, 10), (2, 4, 6, 8, 10)


def _points(results, model):
    """[(program, bits, KLD)] of the newest lines."""
    for (program, _), line in newest(results, LENGTH, model).items():
        if line.number("bits") < 16:
            yield program, line.number("bits"), line.number("kld_mean")


def _steps(points):
    """The points that lose less than all points with fewer bits."""
    least = float("inf")
    for x, kld in sorted(points):
        if kld < least:
            least = kld
            yield x, kld


def _panel(canvas, results, model, top):
    up = Scale((0.00004, 20), (top + PANEL, top), log=True)
    across = Scale((1.5, 11), (LEFT, RIGHT))
    canvas.text(LEFT, top - 12, model, bold=True)
    for tick in KLDS:
        canvas.path([(LEFT, up(tick)), (RIGHT, up(tick))])
        canvas.text(LEFT - 10, up(tick) + 6, f"{tick:g}", "soft", "end")
    for tick in BITS:
        canvas.text(across(tick), top + PANEL + 22, str(tick), "soft", "middle")
    points, names = sorted(_points(results, model)), list(COLORS)
    for program in COLORS:
        line = [(bits, kld) for name, bits, kld in points if name == program]
        if program == "kvant":
            canvas.path([(across(bits), up(kld)) for bits, kld in _steps(line)], "ours", 2)
        for bits, kld in line:
            canvas.mark(names.index(program), across(bits), up(kld), COLORS[program])


def draw(theme, results):
    bottom = TOP + len(MODELS) * (PANEL + GAP)
    canvas = Canvas(theme, bottom + 96, "Loss against bits of the caches of several programs")
    canvas.text(16, 30, "What a bit buys, program by program", size=20, bold=True)
    canvas.text(16, 58, f"KL divergence from f16 at {LENGTH:,} tokens (less is better),", "soft")
    canvas.text(16, 80, "against bits per number with everything counted", "soft")
    for number, model in enumerate(MODELS):
        _panel(canvas, results, model, TOP + number * (PANEL + GAP))
    measured = {program for model in MODELS for program, *_ in _points(results, model)}
    shown = [program for program in COLORS if program in measured]
    for number, program in enumerate(shown):
        x, y = 28 + 170 * (number % 2), bottom + 10 + 28 * (number // 2)
        canvas.mark(list(COLORS).index(program), x, y, COLORS[program])
        canvas.text(x + 14, y + 6, program, "soft")
    return canvas
