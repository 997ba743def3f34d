"""A token's way into the cache: rows wait in an open block or are encoded, and attention reads
both kinds of pages."""

from draw import WIDTH, Canvas

MIDDLE = WIDTH / 2
WAIT, SEAL = 134, WIDTH - 134
BOX, HIGH = 236, 66


def draw(theme, results):
    canvas = Canvas(theme, 512, "A token's way from append to a sealed page")
    canvas.text(16, 30, "A token's way into the cache", size=20, bold=True)
    _box(canvas, MIDDLE, 54, ("a key and a value", "of one layer and kv head"), "back")
    _arrow(canvas, (MIDDLE, 54 + HIGH), (MIDDLE, 150))
    _box(canvas, MIDDLE, 150, ("its block of 64 tokens", "must it wait?"), "back")
    _arrow(canvas, (MIDDLE - 50, 150 + HIGH), (WAIT, 262))
    _arrow(canvas, (MIDDLE + 50, 150 + HIGH), (SEAL, 262))
    canvas.text(WAIT - 4, 244, "yes", "soft", "middle")
    canvas.text(SEAL + 4, 244, "no", "soft", "middle")
    _box(canvas, WAIT, 262, ("open page", "rows of fp16"), "exact")
    _box(canvas, SEAL, 262, ("encode", "centre, W, rotation, codes"), "back")
    _arrow(canvas, (WAIT + BOX / 2, 295), (SEAL - BOX / 2, 295))
    _arrow(canvas, (SEAL, 262 + HIGH), (SEAL, 358))
    _box(canvas, SEAL, 358, ("sealed page", "codes and scales"), "fill")
    _arrow(canvas, (WAIT, 262 + HIGH), (WAIT, 358))
    _box(canvas, WAIT, 358, ("attention", "reads both kinds of pages"), "back")
    _arrow(canvas, (SEAL - BOX / 2, 391), (WAIT + BOX / 2, 391))
    canvas.text(16, 462, "A block waits until a centre is learned, until it is", "soft")
    canvas.text(16, 486, "full, or while the codec keeps recent tokens exact.", "soft")
    return canvas


def _box(canvas, x, top, words, fill):
    canvas.rect(x - BOX / 2, top, BOX, HIGH, fill)
    canvas.text(x, top + 28, words[0], anchor="middle", bold=True)
    canvas.text(x, top + 51, words[1], "soft", "middle")


def _arrow(canvas, start, end):
    """A straight line with a head at its end."""
    (x, y), (dx, dy) = end, (end[0] - start[0], end[1] - start[1])
    length = (dx * dx + dy * dy) ** 0.5
    ux, uy = 8 * dx / length, 8 * dy / length
    canvas.path([start, end], "soft", 2)
    canvas.path(
        [(x - ux - uy / 2, y - uy + ux / 2), end, (x - ux + uy / 2, y - uy - ux / 2)], "soft", 2
    )
