"""The way of a query through the code, from an attention node to its output."""

from draw import WIDTH, Canvas
from flow import arrow, box, column

LEFT, WIDE = 16, 236
RIGHT = WIDTH - 16 - WIDE
MIDDLES = (LEFT + WIDE / 2, RIGHT + WIDE / 2)
CPU = (
    ("attention node", ["ops_attention.c"]),
    ("cut into work items", ["attention/plan.c"]),
    ("transform the query", ["attention/tensor_reader.c"]),
    ("each page: keys", ["on codes, or as a tile", "attention/codes.c"]),
    ("softmax, online", ["attention/work_item.c"]),
    ("each page: values", ["attention/codes.c"]),
    ("add the parts", ["attention/attention.c"]),
)
GPU = (
    ("masks to lengths", ["gpu/masks.c"]),
    ("attention node", ["gpu/attention.c"]),
    ("transform the query", ["cuda/encode/queries.cu"]),
    ("choose a kernel", ["cuda/attention/launch.cu"]),
)
KERNELS = (
    ("few query rows", ["codes are operands", "cuda/attention"]),
    ("more query rows", ["pages are unpacked", "cuda/tiles"]),
    ("other codecs", ["cuda/any"]),
)
NOTES = (
    "Stored rows are never transformed back. The query is",
    "transformed once for each transform, the output once.",
    "Layers that are in place stay with llama.cpp's own",
    "kernels: cpu_in_place.c, gpu/in_place.c. Inner loops",
    "are in src/kernels. Paths are as in a key's figure.",
)


def draw(theme, results):
    canvas = Canvas(theme, 880, "The way of a query through the files of kvant")
    canvas.text(LEFT, 30, "The way of a query", size=20, bold=True)
    for x, name in zip(MIDDLES, ("on a CPU", "on a GPU")):
        canvas.text(x, 62, name, anchor="middle", bold=True)
    ends = [column(canvas, LEFT, WIDE, 76, CPU)]
    end = column(canvas, RIGHT, WIDE, 76, GPU)
    inner = WIDE - 32
    y = end + 20
    arrow(canvas, [(MIDDLES[1], end), (MIDDLES[1], y)])
    for name, lines in KERNELS:
        y = box(canvas, (RIGHT, y, WIDE), name, lines, ("fill", "ours"))
    ends.append(y)
    y = max(ends) + 28
    for x, end in zip(MIDDLES, ends):
        arrow(canvas, [(x, end), (x, y)])
    end = box(
        canvas, (LEFT, y, WIDTH - 2 * LEFT), "output, transformed back", ["R, c and s of values"]
    )
    for number, line in enumerate(NOTES):
        canvas.text(LEFT, end + 34 + 22 * number, line, "soft")
    return canvas
