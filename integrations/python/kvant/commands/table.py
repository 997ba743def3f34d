"""Tables of results on stdout."""

import math
from typing import NamedTuple, Optional

from .cli import plain


class Column(NamedTuple):
    key: str
    heading: Optional[str]  # in the table; None leaves the column out there
    digits: Optional[int] = None  # None: text
    factor: float = 1  # of the number in the table; 100: a share that is shown in percent


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


def _shown(column, value):
    if column.digits is None:
        return plain(value or "-")
    text = fixed(None if value is None else value * column.factor, column.digits)
    return text + " %" if column.factor == 100 and text != "-" else text


def print_columns(columns, rows):
    """Prints a table. Each row is a dictionary with a value for each column."""
    shown = [column for column in columns if column.heading]
    lines = [[_shown(column, row[column.key]) for column in shown] for row in rows]
    texts = {column.heading for column in shown if column.digits is None}
    print_table([column.heading for column in shown], lines, texts)
