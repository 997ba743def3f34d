"""The lines of bench/results/*.csv, and which of them a table takes: the newest one for each cell.

Newest means the latest `date`, and the last line of the file among equal dates or without dates.
Results are appended, so this needs no git history, and a source tarball gives the same tables as a
checkout. age.py compares the choice with git's order.
"""

import csv
import re


class Missing(Exception):
    """A table needs a line or a number that the results do not have."""


class Line(dict):
    """One line of a CSV: {column: text}, and where it stands."""

    def __init__(self, columns, file, place):
        super().__init__(columns)
        self.file, self.place = file, place

    def number(self, column):
        try:
            return float(self[column])
        except (KeyError, TypeError, ValueError):
            where = f"{self.file}, line {self.place}"
            raise Missing(f"{where}: no number in column {column}") from None


def where(test, words):
    """A condition on a cell: test(cell). Messages show it as the words."""
    test.words = words
    return test


def starts(text):
    """A condition on a cell: begins with the text."""
    return where(lambda cell: cell.startswith(text), f"{text}...")


def has(text):
    """A condition on a cell: contains the text."""
    return where(lambda cell: text in cell, f"...{text}...")


def like(pattern):
    """A condition on a cell: all of it matches the regular expression."""
    return where(lambda cell: re.fullmatch(pattern, cell) is not None, f"/{pattern}/")


def one_of(*texts):
    """A condition on a cell: equals one of the texts."""
    return where(lambda cell: cell in texts, "|".join(texts))


def _matches(line, wanted):
    return all(
        want(line[column]) if callable(want) else line[column] == str(want)
        for column, want in wanted.items()
    )


class Results:
    """The CSVs of a folder. `used` collects each line that a table took, and the older lines for
    the same cell."""

    def __init__(self, folder):
        self.folder, self.used, self._files = folder, [], {}

    def lines(self, file, wanted=None):
        """The lines of a file that match. wanted: {column: text, or condition such as starts()}."""
        if file not in self._files:
            self._files[file] = self._read(file)
        unknown = set(wanted or {}) - set(self._files[file][0])
        if unknown:
            raise Missing(f"{file} has no column {', '.join(sorted(unknown))}")
        return [line for line in self._files[file] if _matches(line, wanted or {})]

    def newest(self, file, wanted):
        """The newest line that matches. Raises Missing where there is none."""
        found = self.lines(file, wanted)
        if not found:
            words = (f"{name}={getattr(want, 'words', want)}" for name, want in wanted.items())
            raise Missing(f"{file} has no line with {', '.join(words)}")
        return self.take(found)

    def maybe(self, file, wanted):
        """As newest(), but None where no line matches: for a cell that may stay empty."""
        return self.newest(file, wanted) if self.lines(file, wanted) else None

    def pairs(self, file, ours, rival, run):
        """Each line of ours and the rival's nearest line of the same run: they are alike in the
        columns of run. Lines of ours without a rival do not count."""
        rivals, pairs = self.lines(file, rival), []
        for line in self.lines(file, ours):
            same = [other for other in rivals if all(other[name] == line[name] for name in run)]
            if same:
                pairs.append((line, min(same, key=lambda other: abs(other.place - line.place))))
        return pairs

    def pair(self, file, ours, rival, run):
        """The newest of these pairs. None where there is none."""
        pairs = {line.place: (line, other) for line, other in self.pairs(file, ours, rival, run)}
        return pairs[self.take([line for line, _ in pairs.values()]).place] if pairs else None

    def take(self, lines):
        """The newest of lines that the caller has chosen from one file; notes that it was used."""
        *older, best = sorted(lines, key=lambda line: (line.get("date") or "", line.place))
        self.used.append((best, older))
        return best

    def _read(self, file):
        try:
            with open(self.folder / file, newline="") as opened:
                reader = csv.DictReader(opened)
                lines = [Line(columns, file, reader.line_num) for columns in reader]
        except OSError as error:
            raise Missing(f"{file}: {error.strerror}") from None
        if not lines:
            raise Missing(f"{file} has no lines")
        return lines
