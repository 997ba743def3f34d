"""The life of a block: how a row becomes codes, and when its block is opened again."""

from draw import WIDTH, Canvas
from flow import arrow, box

LEFT, RIGHT = 16, WIDTH - 16


def _ways(canvas, middle, wide):
    """Draws the arrows between the boxes, and says when a block takes them."""
    right, side = RIGHT - wide / 2, LEFT + wide
    arrow(canvas, [(LEFT + 232, 83), (RIGHT - wide, 83)])
    arrow(canvas, [(middle, 114), (middle, 178)])
    arrow(canvas, [(right, 114), (right, 198), (side, 198)])
    canvas.text(right - 12, 140, "when f16 no longer fits:", "soft", "end")
    canvas.text(right - 12, 162, "rows go to pages", "soft", "end")
    arrow(canvas, [(middle, 240), (middle, 352)])
    canvas.text(middle + 12, 274, "rows are no longer the newest: kvant", "soft")
    canvas.text(middle + 12, 296, "encodes them; when it has encoded", "soft")
    canvas.text(middle + 12, 318, "all 64, it seals the block", "soft")
    arrow(canvas, [(side, 383), (RIGHT - 40, 383), (RIGHT - 40, 222), (side, 222)])
    canvas.text(side + 12, 406, "a token is written again:", "soft")
    canvas.text(side + 12, 428, "the block is reopened", "soft")
    arrow(canvas, [(middle, 414), (middle, 462)])


def draw(theme, results):
    canvas = Canvas(theme, 612, "A block's life: in place, open, sealed, and opened again")
    canvas.text(LEFT, 30, "A block's life", size=20, bold=True)
    wide, middle = 200, LEFT + 100
    box(canvas, (LEFT, 52, 232), "a new key or value", ["is checked for NaN"], ("back", "soft"))
    box(canvas, (RIGHT - wide, 52, wide), "in place", ["f16, one stream"], ("exact", "soft"))
    box(canvas, (LEFT, 178, wide), "open block", ["exact rows, fp16"], ("exact", "soft"))
    box(canvas, (LEFT, 352, wide), "sealed block", ["codes and scales"], ("fill", "ours"))
    box(canvas, (LEFT, 462, wide), "attention", ["reads all forms"], ("back", "soft"))
    _ways(canvas, middle, wide)
    canvas.text(LEFT, 556, "The first block of each sequence stays open. A block is", "soft")
    canvas.text(LEFT, 578, "in one state for all kv heads of a layer's keys, and in", "soft")
    canvas.text(LEFT, 600, "one state for all kv heads of its values.", "soft")
    return canvas
