"""GPUs on which kvant selftest ran, from the files of their owners: bench/results/selftest."""

import json

from text import code, significant, table

FILE_VERSION = 1  # of tools/selftest_report.c

# Cards that the project asks for: part of the driver's name, and the compute capability.
WANTED = {
    "A100": "8.0",
    "RTX 3090": "8.6",
    "RTX 4090": "8.9",
    "RTX 6000 Ada": "8.9",
    "H100": "9.0",
    "RTX 5090": "12.0",
    "RTX PRO 6000": "12.0",
}


def _reports(results):
    """(report, number of the device, device) of each GPU that was tried, by compute capability."""
    found = []
    for path in sorted((results.folder / "selftest").glob("*.json")):
        report = json.loads(path.read_text())
        if report["kvant_selftest"] != FILE_VERSION:
            raise ValueError(f"{path.name}: a file of version {report['kvant_selftest']}")
        if report["shared_memory_limit_kib"]:
            raise ValueError(f"{path.name}: a run with --shared-memory, which pretends another GPU")
        devices = enumerate(report["devices"])
        found += [(report, i, device) for i, device in devices if device["kind"] == "gpu"]
    return sorted(found, key=lambda one: (float(one[2]["compute_capability"]), one[2]["name"]))


def _counts(report, device):
    """How many results of a device are right, wrong, and without a kernel."""
    own = [result for result in report["results"] if result["device"] == device]
    steps = [{one[name] for name in ("encode", "decode", "attention")} for one in own]
    right = sum(states == {"right"} for states in steps)
    without = sum("no kernel on GPUs" in states for states in steps)
    return right, len(own) - right - without, without


def cards(results):
    """GPUs by compute capability: how many codecs by head_dim kvant selftest found right."""
    reports = _reports(results)
    names = [device["name"] for _, _, device in reports]
    rows = []
    for report, i, device in reports:
        right, wrong, without = _counts(report, i)
        state = "not tried" if device["why"] else right
        cuda = device["driver_cuda_version"]  # 12040 is 12.4
        version = f"{report['kvant_version']}, CUDA {cuda // 1000}.{cuda % 1000 // 10}"
        rows.append((device["compute_capability"], device["name"], state, wrong, without, version))
    for name, capability in WANTED.items():
        if not any(name in reported for reported in names):
            rows.append((capability, name, "not reported yet", "", "", ""))
    rows.sort(key=lambda row: float(row[0]))
    heading = ("card", "capability", "right", "wrong", "no kernel", "kvant, driver")
    return table(heading, *([row[1], row[0], *map(str, row[2:])] for row in rows))


def cards_speed(results):
    """Rows encoded and bytes read by attention per second next to a copy, by GPU and codec."""
    rows = []
    for report, i, device in _reports(results):
        for speed in report["speeds"]:
            if speed["device"] != i:
                continue
            attention = speed["attention_gbytes_read_per_second"]
            copied = speed["copy_gbytes_read_and_written_per_second"]
            rows.append(
                [
                    device["name"],
                    code(speed["k"]),
                    significant(speed["encoded_rows_per_second"] / 1e6),
                    f"{attention:.0f}",
                    f"{copied:.0f}",
                    f"{attention / copied:.2f}",
                    f"{speed['attention_tokens_per_second_of_one_layer']:,.0f}",
                ]
            )
    heading = (
        "card",
        "codec",
        "M rows/s encoded",
        "GB/s attention",
        "GB/s copy",
        "of the copy",
        "tokens/s",
    )
    return table(heading, *rows)
