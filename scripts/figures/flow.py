"""Boxes and arrows of figures that show a way through the code or the life of something."""

LINE = 22  # pixels from a line of words to the next
TOP = 26  # from the top of a box to its first line


def height(lines):
    """The height of a box with a name and `lines` further lines."""
    return TOP + LINE * lines + 14


def box(canvas, place, name, lines, colors=("back", "soft")):
    """A box at (x, y, width) with a bold name and further lines. Returns its lower end."""
    x, y, width = place
    canvas.rect(x, y, width, height(len(lines)), *colors)
    canvas.text(x + width / 2, y + TOP, name, anchor="middle", bold=True)
    for number, line in enumerate(lines, 1):
        canvas.text(x + width / 2, y + TOP + LINE * number, line, "soft", "middle")
    return y + height(len(lines))


def arrow(canvas, points):
    """A line through points with a head at its end. The last part is level or upright."""
    canvas.path(points, "text", 1.5)
    (x0, y0), (x, y) = points[-2:]
    dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
    canvas.path([(x - 8 * dx - 5 * dy, y - 8 * dy - 5 * dx), (x, y)], "text", 1.5)
    canvas.path([(x - 8 * dx + 5 * dy, y - 8 * dy + 5 * dx), (x, y)], "text", 1.5)


def column(canvas, x, width, y, steps, gap=20):
    """Boxes below one another with arrows between them; a step is (name, lines, colors). Returns
    the lower end of the last box."""
    end = None
    for name, lines, *colors in steps:
        if end is not None:
            arrow(canvas, [(x + width / 2, end), (x + width / 2, y)])
        end = box(canvas, (x, y, width), name, lines, *colors)
        y = end + gap
    return end
