"""How a calibration fits later positions: KLD of balanced by position."""

from text import divergence, table

PARTS = (("0", "1023"), ("1024", "2047"), ("2048", "4095"), ("4096", "8191"))
WAYS = {"learned (default)": "0", "calibrated": "2048", "calibrated, `--positions 8192`": "8192"}


def calibration_positions(results):
    """KLD of balanced by position, SmolLM2: learned; calibrated without and with --positions."""
    rows = []
    for name, calibrated in WAYS.items():
        row = [name]
        for first, last in PARTS:
            wanted = {
                "cache": "balanced",
                "model": "SmolLM2",
                "calibrated": calibrated,
                "from": first,
                "to": last,
            }
            row.append(divergence(results.newest("long_contexts.csv", wanted).number("kld_mean")))
        rows.append(row)
    return table(
        ["KLD of `balanced`, SmolLM2, positions", *(f"{a} to {b}" for a, b in PARTS)], *rows
    )
