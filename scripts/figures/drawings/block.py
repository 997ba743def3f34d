"""The states of a block: how a row gets from append to a sealed page."""

from draw import WIDTH, Canvas

LEFT, RIGHT = 16, WIDTH - 16
HIGH = 62


def _box(canvas, x, y, width, name, line, fill, stroke):
    canvas.rect(x, y, width, HIGH, fill, stroke)
    canvas.text(x + width / 2, y + 26, name, anchor="middle", bold=True)
    canvas.text(x + width / 2, y + 48, line, "soft", "middle")


def _arrow(canvas, points):
    canvas.path(points, "text", 1.5)
    (x0, y0), (x, y) = points[-2:]
    dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
    canvas.path([(x - 8 * dx - 5 * dy, y - 8 * dy - 5 * dx), (x, y)], "text", 1.5)
    canvas.path([(x - 8 * dx + 5 * dy, y - 8 * dy + 5 * dx), (x, y)], "text", 1.5)


def draw(theme, results):
    canvas = Canvas(theme, 568, "The states of a block of 64 tokens")
    canvas.text(LEFT, 30, "A token's way into a block", size=20, bold=True)
    wide, middle = 200, LEFT + 116
    _box(canvas, LEFT, 52, 232, "a new key or value", "is checked for NaN", "back", "soft")
    _arrow(canvas, [(middle, 114), (middle, 160)])
    canvas.text(middle + 12, 143, "does it have to wait?", "soft")
    _box(canvas, LEFT, 160, wide, "open block", "rows in fp16", "exact", "soft")
    _box(canvas, RIGHT - wide, 160, wide, "exact for good", "rows in fp16", "exact", "soft")
    right = RIGHT - wide / 2
    _arrow(canvas, [(LEFT + 232, 83), (right, 83), (right, 160)])
    canvas.text(RIGHT, 72, "a sequence's first block of keys", "soft", "end")
    _arrow(canvas, [(middle, 222), (middle, 330)])
    canvas.text(middle + 12, 252, "the transform is learned,", "soft")
    canvas.text(middle + 12, 274, "or the block is full, or tokens are no", "soft")
    canvas.text(middle + 12, 296, "longer recent: kvant seals the block", "soft")
    _box(canvas, LEFT, 330, wide, "sealed block", "codes and scales", "fill", "ours")
    _arrow(canvas, [(LEFT + wide, 350), (RIGHT - 90, 350), (RIGHT - 90, 372), (LEFT + wide, 372)])
    canvas.text(LEFT + wide + 12, 340, "on a CPU: later tokens", "soft")
    _arrow(canvas, [(middle, 392), (middle, 440)])
    _arrow(canvas, [(RIGHT - 36, 222), (RIGHT - 36, 471), (LEFT + wide, 471)])
    _box(canvas, LEFT, 440, wide, "attention", "reads all of them", "back", "soft")
    canvas.text(LEFT, 532, "A block is in one state for all kv heads of a layer's", "soft")
    canvas.text(LEFT, 556, "keys, and in one state for all kv heads of its values.", "soft")
    return canvas
