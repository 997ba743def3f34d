"""Markdown and numbers, as tables write them."""


def table(heading, *rows):
    """Markdown lines. The heading and each row are a list of cells; None is an empty cell."""
    for row in rows:
        if len(row) != len(heading):
            raise ValueError(f"{len(row)} cells under {len(heading)} headings: {row}")
    cells = ([f" {cell} |" if cell else " |" for cell in row] for row in (heading, *rows))
    lines = ["|" + "".join(row) for row in cells]
    return [lines[0], "|---" * len(heading) + "|", *lines[1:]]


def significant(value, digits=3):
    """A positive number with so many significant digits and no exponent: 0.0114, 1.93, 0.736."""
    if value == 0:
        return "0"
    whole = len(f"{abs(value):.0f}") if abs(value) >= 1 else 0
    if whole:
        return f"{value:.{max(digits - whole, 0)}f}"
    return f"{value:.{digits}g}" if abs(value) >= 1e-4 else f"{value:.1g}"


def divergence(value):
    """A mean KL divergence: four decimals below 0.1, then three, then two. Noise below 0 is 0."""
    value = max(value, 0.0)
    return f"{value:.4f}" if value < 0.0995 else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def times(value):
    """A ratio to a rival, with two decimals."""
    return f"{value:.2f}"


def thousands(value):
    """A whole number with commas: 16,384."""
    return f"{value:,.0f}"


def code(text):
    return f"`{text}`"
