"""Two channels of a real model's keys before and after what kvant does before it quantises them."""

from draw import Canvas, Scale

FILE = "keys.csv"
STEPS = (
    ("plain", "From the model", "far from 0, wide in one channel"),
    ("centred", "Centred, times W", "around 0, wider where queries look"),
    ("rotated", "Rotated", "every channel is about equally wide"),
)
SIDE, TOP, GAP, LEFT = 190, 80, 24, 40


def draw(theme, results):
    canvas = Canvas(
        theme, TOP + 3 * (SIDE + GAP) + 44, "Two channels of keys before and after a transform"
    )
    canvas.text(16, 30, "Keys before and after a transform", size=20, bold=True)
    most = max(abs(x) for step, *_ in STEPS for point in _points(results, step) for x in point)
    for number, (step, *words) in enumerate(STEPS):
        top = TOP + number * (SIDE + GAP) - 24
        _cloud(canvas, _points(results, step), most, top, "abd"[number])
        canvas.text(LEFT + SIDE + 24, top + SIDE / 2 - 16, f"{number + 1}. {words[0]}", bold=True)
        for row, line in enumerate(_wrapped(words[1])):
            canvas.text(LEFT + SIDE + 24, top + SIDE / 2 + 8 + 22 * row, line, "soft")
    line = results.lines(FILE)[0]
    first, second = line["channels"].split()
    words = f"{line['model']}: layer {line['layer']}, kv head {line['head']},"
    canvas.text(16, canvas.height - 42, words, "soft")
    canvas.text(16, canvas.height - 18, f"channels {first} (across) and {second} (up)", "soft")
    return canvas


def _points(results, step):
    return [(x.number("x"), x.number("y")) for x in results.lines(FILE, {"step": step})]


def _wrapped(words, most=26):
    """Lines of at most `most` characters."""
    line = ""
    for word in words.split():
        if line and len(line) + len(word) >= most:
            yield line
            line = ""
        line += (" " if line else "") + word
    yield line


def _cloud(canvas, points, most, top, color):
    """Points around a cross at 0, on the same scale in both directions and in all clouds."""
    across = Scale((-most, most), (LEFT, LEFT + SIDE))
    up = Scale((-most, most), (top + SIDE, top))
    canvas.rect(LEFT, top, SIDE, SIDE, "back", "grid")
    canvas.path([(LEFT, up(0)), (LEFT + SIDE, up(0))], "soft")
    canvas.path([(across(0), top), (across(0), top + SIDE)], "soft")
    for x, y in points:
        canvas.dot(across(x), up(y), color, 2.2, 0.6)
