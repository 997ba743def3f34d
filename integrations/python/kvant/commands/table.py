"""Tables of results on stdout."""

import math


def fixed(value, digits):
    """A number of a table; no "-0.00"."""
    if value is None or math.isnan(value):
        return "-"
    return f"{0.0 if abs(value) < 0.5 * 10.0**-digits else value:.{digits}f}"


def print_table(headings, lines, text_columns):
    """Prints columns under headings. Columns of text, which are named, are aligned to the left; all
    other columns are numbers and are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *lines)]
    for line in [headings, *lines]:
        words = (
            w.ljust(n) if h in text_columns else w.rjust(n)
            for h, w, n in zip(headings, line, widths)
        )
        print("  ".join(words).rstrip())
