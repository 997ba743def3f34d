"""The way of a key row through the code, from llama.cpp to its page, on a CPU and on a GPU."""

from draw import WIDTH, Canvas
from flow import arrow, box, column

LEFT, WIDE = 16, 236
RIGHT = WIDTH - 16 - WIDE
MIDDLES = (LEFT + WIDE / 2, RIGHT + WIDE / 2)
BEFORE = (
    (
        ("SET_ROWS node", ["ops_set_rows.c"]),
        ("block and slot", ["placement.c"]),
        ("check, learn", ["cache/write.c", "cache/transforms.c"]),
    ),
    (
        ("note copied inputs", ["gpu/devices.c"]),
        ("before the graph", ["gpu/graph.c"]),
        ("a step for the plan", ["cells, positions, masks", "gpu/step.c"]),
    ),
)
AFTER = (
    (
        ("seal and open pages", ["cache/steps.c", "cache/fp16_pages.c"]),
        ("place the row", ["cache/write_encode.c"]),
        ("R W (x - c) / s", ["codec/transform.c"]),
        ("encode", ["codec/trellis.c"]),
    ),
    (
        ("learn W and use it", ["gpu/first_matrix.c", "gpu/learner.c"]),
        ("seal and open pages", ["gpu/fp16_pages.c"]),
        ("SET_ROWS node", ["gpu/ops.c"]),
        ("transform, encode", ["cuda/encode/append.cu"]),
    ),
)
NOTES = (
    "A GPU does all steps but the last two before the graph.",
    "Rows of a kvant_cache begin at cache/cache.c and go on",
    "at cache/write.c; on a GPU cache/device_cuda.c encodes.",
    "Paths begin in src; gpu and names without a folder",
    "are in integrations/llama.cpp.",
)


def _join(canvas, ends, y):
    """Arrows from the ends of both columns to a box below them."""
    for x, end in zip(MIDDLES, ends):
        arrow(canvas, [(x, end), (x, y)])


def draw(theme, results):
    canvas = Canvas(theme, 1066, "The way of a key row through the files of kvant")
    canvas.text(LEFT, 30, "The way of a key row", size=20, bold=True)
    for x, name in zip(MIDDLES, ("on a CPU", "on a GPU")):
        canvas.text(x, 62, name, anchor="middle", bold=True)
    ends = [column(canvas, x, WIDE, 76, steps) for x, steps in zip((LEFT, RIGHT), BEFORE)]
    y = max(ends) + 28
    _join(canvas, ends, y)
    wide = WIDTH - 2 * LEFT
    end = box(
        canvas, (LEFT, y, wide), "which blocks are exact?", ["store/plan.c"], ("fill", "ours")
    )
    for x in MIDDLES:
        arrow(canvas, [(x, end), (x, end + 28)])
    ends = [column(canvas, x, WIDE, end + 28, steps) for x, steps in zip((LEFT, RIGHT), AFTER)]
    y = max(ends) + 28
    _join(canvas, ends, y)
    y = box(canvas, (LEFT, y, wide), "the page of its block", ["exact if the block is open"])
    half = wide / 2
    box(canvas, (LEFT, y, half), "exact page", ["fp16"], ("exact", "soft"))
    end = box(canvas, (LEFT + half, y, half), "sealed page", ["page/layout.c"], ("fill", "ours"))
    for number, line in enumerate(NOTES):
        canvas.text(LEFT, end + 34 + 22 * number, line, "soft")
    return canvas
