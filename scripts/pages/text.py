"""Markdown and numbers, as tables write them."""


def table(heading, *rows):
    """Markdown lines. The heading and each row are a list of cells; None is an empty cell."""
    for row in rows:
        if len(row) != len(heading):
            raise ValueError(f"{len(row)} cells under {len(heading)} headings: {row}")
    cells = (
        [" |" if cell in (None, "") else f" {cell} |" for cell in row] for row in (heading, *rows)
    )
    lines = ["|" + "".join(row) for row in cells]
    return [lines[0], "|---" * len(heading) + "|", *lines[1:]]


def table_of(heading, names, rows):
    """Markdown lines of {label: {name: cell}}; the label is the first column."""
    return table([heading, *names], *([label, *map(row.get, names)] for label, row in rows.items()))


def significant(value, digits=3):
    """A number with this many significant digits and no exponent: 0.0120, 1234."""
    if value == 0:
        return "0"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return f"{value:.{max(digits - 1 - exponent, 0)}f}"


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


def size(bytes):
    """Bytes with their unit: 18 MiB, 1.14 GiB, 40.0 GiB."""
    if bytes < 2**30:
        return f"{bytes / 2**20:.0f} MiB" if bytes >= 10 * 2**20 else f"{bytes / 2**20:.1f} MiB"
    return f"{significant(bytes / 2**30)} GiB"
