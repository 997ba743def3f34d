"""Reads traces of KVANT_TRACE. integrations/llama.cpp/trace.h explains the format."""

import gzip
from dataclasses import dataclass, field

HEADER = "kvant-trace 1"
KINDS = "oswpkzx"


@dataclass
class Event:
    """One line; lists are expanded."""

    kind: str
    step: int
    stream: int
    n_kv: int
    slots: list
    positions: list
    visible: list  # pairs of first cell and end


@dataclass
class Cache:
    """The events of one cache of one process."""

    name: str
    n_streams: int
    n_cells: int  # of one stream
    events: list = field(default_factory=list)


def runs(text):
    """The runs of "5+3,9*2": (5, 3, 1), (9, 2, 0)."""
    for run in [] if text == "-" else text.split(","):
        step = 1 if "+" in run else 0
        first, n = run.split("+" if step else "*")
        if int(n) < 1:
            raise ValueError(f"empty run {run}")
        yield int(first), int(n), step


def numbers(text):
    return [first + i * step for first, n, step in runs(text) for i in range(n)]


def read_line(columns):
    kind, _, step, stream, n_kv, slots, positions, visible = columns
    if kind not in KINDS or len(kind) != 1:
        raise ValueError(f"unknown kind {kind}")
    event = Event(
        kind,
        int(step),
        int(stream),
        int(n_kv),
        numbers(slots),
        numbers(positions),
        [(first, first + n) for first, n, _ in runs(visible)],
    )
    if event.positions and len(event.positions) != len(event.slots):
        raise ValueError("as many positions as slots are wanted")
    return event


def check(cache, event):
    """No list may name a cell that the cache does not have."""
    ends = [end for _, end in event.visible] + [slot + 1 for slot in event.slots]
    if event.stream >= cache.n_streams or max(ends, default=0) > cache.n_cells:
        raise ValueError("a stream or a cell that the cache does not have")
    if min(event.slots, default=0) < 0 or event.n_kv > cache.n_cells:
        raise ValueError("a cell that the cache does not have")


def read(path):
    """The caches of a trace, in the order in which they were created."""
    caches, open_caches = [], None
    with (gzip.open if str(path).endswith(".gz") else open)(path, "rt", encoding="ascii") as file:
        for number, line in enumerate(file, 1):
            try:
                if line.strip() == HEADER:
                    open_caches = {}  # another process appends
                    continue
                event = read_line(line.split())
                name = line.split()[1]
                if event.kind == "o":
                    open_caches[name] = Cache(str(len(caches) + 1), event.stream, event.n_kv)
                    caches.append(open_caches[name])
                    continue
                check(open_caches[name], event)
                open_caches[name].events.append(event)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: not a line of {HEADER}: {error}") from error
    return caches
