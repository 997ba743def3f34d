"""Saved states of a llama-server: the size of a slot's file, and the CPU time of saving and
restoring it."""

from caches import state
from results import Missing
from text import table, thousands

CACHES = (
    ("f16", "", "llama.cpp's f16"),
    ("q8_0", "", "llama.cpp's `q8_0`"),
    ("q4_0", "", "llama.cpp's `q4_0`"),
    ("balanced", "rows", "`balanced`, `KVANT_STATES=rows`"),
    ("quality", "auto", "`quality`"),
    ("balanced", "auto", "`balanced`"),
    ("small", "auto", "`small`"),
)


def saved_states(results):
    """MiB of a slot's file, and milliseconds of CPU time, by cache and by number of tokens."""
    file, rows = "saved_states.csv", []
    for tokens in sorted({int(line["tokens"]) for line in results.lines(file)}):
        for cache, states, name in CACHES:
            wanted = {"cache": cache, "states": states, "tokens": str(tokens)}
            line = results.newest(file, wanted)
            times = [f"{line.number(f'{what}_cpu_ms'):.1f}" for what in ("save", "restore")]
            size = f"{line.number('bytes') / 2**20:.1f}"
            rows.append([thousands(tokens), name, size, *times, line["machine"]])
    heading = ["tokens", "cache", "file, MiB", "saving, ms of CPU", "restoring, ms of CPU"]
    return table([*heading, "machine"], *rows)


DISK_CACHES = (
    ("f16", "llama.cpp's f16"),
    ("q8_0", "llama.cpp's `q8_0`"),
    ("q4_0", "llama.cpp's `q4_0`"),
    ("quality", "`quality`"),
    ("balanced", "`balanced`"),
    ("small", "`small`"),
)


def state_disk(results):
    """GiB of a file of 32,768 tokens of an 8B shape, and seconds of saving it to a disk and of
    restoring it from there, with the CPU time in them. `disk alone` moves a file of the same size
    without using it."""
    f16, rows = state(results, "f16"), []
    for cache, name in DISK_CACHES:
        line = state(results, cache)
        cells = [f"{line.number('bytes') / 2**30:.2f}"]
        for what, disk in (("save", "disk_write_ms"), ("restore", "disk_read_ms")):
            wall = line.number(f"{what}_ms")
            cells += [f"{wall / 1e3:.1f}", f"{line.number(f'{what}_cpu_ms') / 1e3:.1f}"]
            cells.append(f"{line.number(disk) / 1e3:.1f}" if line[disk] else "")
            cells.append(f"{f16.number(f'{what}_ms') / wall:.1f}")
        rows.append([name, *cells])
    heading = ["cache", "file, GiB"]
    for what in ("saving", "restoring"):
        heading += [f"{what}, s", "of CPU", "disk alone, s", "times as fast as f16"]
    return table(heading, *rows)


def state_gpu(results):
    """The same of a cache on a GPU, through a disk and through files in memory."""
    rows = []
    for through, place in (("disk", "disk"), ("tmpfs", "memory (tmpfs)")):
        f16 = results.newest("state_gpu.csv", {"cache": "f16", "through": through})
        for cache, name in (DISK_CACHES[0], *DISK_CACHES[3:]):
            try:
                line = results.newest("state_gpu.csv", {"cache": cache, "through": through})
            except Missing:  # not measured
                continue
            cells = [f"{line.number('bytes') / 2**30:.2f}"]
            for what, disk in (("save", "disk_write_ms"), ("restore", "disk_read_ms")):
                wall = line.number(f"{what}_ms")
                cells += [f"{wall / 1e3:.2f}", f"{line.number(disk) / 1e3:.2f}"]
                cells.append(f"{f16.number(f'{what}_ms') / wall:.1f}")
            rows.append([name, place, *cells])
    heading = ["cache", "file in", "file, GiB"]
    for what in ("saving", "restoring"):
        heading += [f"{what}, s", "disk alone, s", "times as fast as f16"]
    return table(heading, *rows)
