"""The way of a block through its states, and the functions that decide it."""

from draw import WIDTH, Canvas
from flow import arrow, box

LEFT, RIGHT = 16, WIDTH - 16
WIDE = 176
MIDDLE, SIDE = LEFT + WIDE / 2, LEFT + WIDE
ENTRY = (
    "A step writes rows to the block:",
    "kvant_plan_step_rows() in",
    "store/plan.c gives it a page.",
)
SEALING = (
    "Another block needs the page:",
    "next_to_go() in store/plan.c",
    "chooses. Blocks with no first and",
    "no newest tokens go first.",
    "On a CPU rows that are no longer",
    "the newest are encoded before the",
    "next write: due() in",
    "cache/fp16_pages.c.",
)
REOPENING = ("A row is written again:", "open_block() in store/plan.c.")
NOTES = (
    "Who does what the plan says:",
    "CPU: cache/steps.c, cache/fp16_pages.c",
    "kvant_cache on a GPU: cache/cuda_exact.c",
    "llama.cpp on a GPU: gpu/step.c, gpu/fp16_pages.c",
    "Who decides what is in place, and stores it in pages:",
    "CPU: cpu_in_place.c, cpu_rows.c",
    "llama.cpp on a GPU: gpu/in_place.c, gpu/hand_over.c",
)


def _words(canvas, x, y, lines):
    for number, line in enumerate(lines):
        canvas.text(x, y + 22 * number, line, "soft")


def draw(theme, results):
    canvas = Canvas(theme, 734, "The way of a block, and the files that decide it")
    canvas.text(LEFT, 30, "The way of a block", size=20, bold=True)
    place = RIGHT - 188
    end = box(canvas, (LEFT, 52, WIDE), "no rows", ["new, or all removed"])
    box(canvas, (place, 52, 188), "in place", ["f16, one stream"], ("exact", "soft"))
    exact = end + 92
    arrow(canvas, [(MIDDLE, end), (MIDDLE, exact)])
    _words(canvas, MIDDLE + 12, end + 28, ENTRY)
    x = RIGHT - 20
    arrow(canvas, [(x, end), (x, exact + 24), (SIDE, exact + 24)])
    end = box(canvas, (LEFT, exact, WIDE), "exact, open", ["an fp16 page"], ("exact", "soft"))
    canvas.text(x - 12, exact + 16, "f16 no longer fits", "soft", "end")
    sealed = end + 22 * len(SEALING) + 24
    arrow(canvas, [(MIDDLE, end), (MIDDLE, sealed)])
    _words(canvas, MIDDLE + 12, end + 30, SEALING)
    arrow(canvas, [(SIDE, sealed + 24), (x, sealed + 24), (x, exact + 46), (SIDE, exact + 46)])
    end = box(canvas, (LEFT, sealed, WIDE), "sealed", ["codes and scales"], ("fill", "ours"))
    _words(canvas, SIDE + 12, sealed + 50, REOPENING)
    _words(canvas, LEFT, end + 52, NOTES)
    return canvas
