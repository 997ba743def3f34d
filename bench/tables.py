"""What the scripts that turn bench/results into documents share."""

import csv


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def markdown(heading, names, rows):
    """rows: {label: {name: text}}; the first column is the label."""
    yield f"| {heading} | {' | '.join(names)} |"
    yield "|---" * (len(names) + 1) + "|"
    for label, row in rows.items():
        yield f"| {label} | {' | '.join(row.get(name, '') for name in names)} |"
