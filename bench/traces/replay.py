#!/usr/bin/env python3
"""Replays traces of llama.cpp's cells under the rules of a cache that is f16 itself while it fits.

    bench/traces/replay.py TRACE... [--ratio R]... [--max-tokens N] [--back held|seen|decode]...
                                    [--remap no|buffer|stream]... [--json]

A cache is in place, in llama.cpp's own f16 cells, while the cells that attention reads fit into the
budget. Otherwise its rows are in pages: exact or sealed blocks of 64 cells. Bytes are counted in
rows of f16, a sealed row is --ratio of one. The budget is what --max-tokens (all cells) take
when all but the least exact part is sealed, and 512 exact rows.

--back says when a cache in pages returns to its place, once the cells fit again:
  held     when no block that is held has sealed rows; a block is held until its first cell is at
           or above n_kv, all its rows are overwritten, or the cache is cleared
  seen     when no query of the step sees a sealed row; sealed rows that nobody sees stay aside,
           within the budget, and a query that sees one later ends the phase
  decode   at once; sealed rows are decoded into their place

The option --remap puts a cache with several streams in place, too, with an equal part of the room
for each stream. It does so for all streams together (`buffer`) or for each stream by itself
(`stream`). A step is served in place when all its streams are. Without it (no) such a cache starts
in pages.

Fill is the share of --max-tokens that is alive: a cell is alive from the step that writes it to the
last step that sees it. The table has the share of tokens that were served in place while the fill
was at most a quarter, at most a half, and always. TRACE may be a folder of traces.
"""

import argparse
import itertools
import json
import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import trace_file  # noqa: E402

BLOCK, PAD, RUN, ROOM = 64, 256, 8, 512
FIRST = 64  # tokens of a sequence that are kept exact, where there is room
ALL_ROWS = (1 << BLOCK) - 1


def padded(n):
    return max(PAD, math.ceil(n / PAD) * PAD)


def count(mask):
    return bin(mask).count("1")


def masks(slots):
    """{block: mask of its rows}, in the order of the slots."""
    found = {}
    for slot in slots:
        found[slot // BLOCK] = found.get(slot // BLOCK, 0) | 1 << slot % BLOCK
    return found


def range_masks(ranges):
    found = {}
    for first, end in ranges:
        for block in range(first // BLOCK, (end - 1) // BLOCK + 1):
            low, high = max(first - block * BLOCK, 0), min(end - block * BLOCK, BLOCK)
            found[block] = found.get(block, 0) | (ALL_ROWS >> (BLOCK - high + low)) << low
    return found


class Block:
    """Rows whose newest value is f16, and rows whose newest value is codes."""

    __slots__ = ("exact", "sealed", "seen", "age", "first", "last")

    def __init__(self):
        self.exact = self.sealed = self.seen = self.age = self.last = 0
        self.first = False

    def write(self, rows):
        self.exact |= rows
        self.sealed &= ~rows

    def encode(self, rows):
        self.sealed |= rows
        self.exact &= ~rows


class Count:
    """The counts of a replay."""

    def __init__(self):
        self.hand_overs = self.returns = self.handed_rows = self.decoded_rows = 0
        self.reopened = self.encoded_rows = self.mixed_shifts = 0
        self.peak = 0.0


class Plan:
    """STORE's rules 1 to 4 and 10 for the blocks of one cache."""

    def __init__(self, cache, ratio, max_tokens, back, remap):
        self.n_streams, self.ratio, self.back = cache.n_streams, ratio, back
        least = max(2 * BLOCK, max_tokens // 16)
        room = (max_tokens - least) * ratio + least
        self.budget = room + ROOM
        self.n_least = least // BLOCK
        self.pool = self.n_least + ROOM // BLOCK
        several = cache.n_streams > 1
        self.in_place = int(room / cache.n_streams) // PAD * PAD
        if several and remap == "no":
            self.in_place = 0
        alone = remap == "stream"  # groups of streams that are in place together
        self.group = [s if alone else 0 for s in range(cache.n_streams)]
        self.count = Count()
        self.clear()

    def clear(self):
        self.blocks, self.n_kv = {}, [0] * self.n_streams
        self.placed = {group: self.in_place > 0 for group in self.group}

    # Bytes, in rows of f16

    def is_placed(self, stream):
        return self.placed[self.group[stream]]

    def exact_pages(self):
        return [
            key for key, block in self.blocks.items() if block.exact and not self.is_placed(key[0])
        ]

    def bytes(self, more=0):
        sealed = sum(1 for block in self.blocks.values() if block.sealed)
        placed = sum(n for stream, n in enumerate(self.n_kv) if self.is_placed(stream))
        return placed + more + BLOCK * (len(self.exact_pages()) + sealed * self.ratio)

    def note_bytes(self):
        self.count.peak = max(self.count.peak, self.bytes() / self.budget)

    # Blocks

    def release(self, stream, n_kv):
        self.n_kv[stream] = n_kv
        for key in [key for key in self.blocks if key[0] == stream and key[1] * BLOCK >= n_kv]:
            del self.blocks[key]

    def least(self):
        """Keys of the blocks of the least exact part: first tokens, then those seen last."""
        exact = self.exact_pages()
        age = {key: (self.blocks[key].age, self.blocks[key].last) for key in exact}
        firsts = sorted((key for key in exact if self.blocks[key].first), key=age.get)
        kept = set(firsts[-(self.n_least // 2) :])
        for key in sorted(exact, key=age.get, reverse=True):
            if len(kept) < self.n_least:
                kept.add(key)
        return kept

    def seal(self, n, busy):
        """Seals n blocks that the step does not write, the least part last; returns how many."""
        least = self.least()
        victims = [key for key in self.exact_pages() if key not in busy]
        victims.sort(key=lambda key: (key in least, self.blocks[key].age, self.blocks[key].last))
        spare = sum(1 for key in victims if key not in least)
        victims = victims[: max(n, min(RUN, spare))]
        for key in victims:
            self.blocks[key].encode(self.blocks[key].exact)
        return len(victims)

    def has_room(self, busy):
        """Whether one more exact page fits; seals others when it has to."""
        short = len(self.exact_pages()) + 1 - self.pool
        if short > 0 and self.seal(short, busy) < short:
            return False
        while self.bytes(BLOCK) > self.budget:
            if self.seal(1, busy) == 0:
                return False
        return True

    def write_pages(self, stream, rows):
        busy = {(stream, index) for index in rows}
        for index, mask in rows.items():
            block = self.blocks.setdefault((stream, index), Block())
            if not block.exact and not self.has_room(busy):
                block.encode(mask)
                self.count.encoded_rows += count(mask)
                continue
            self.count.reopened += not block.exact and block.sealed & ~mask != 0
            block.write(mask)

    def write(self, stream, slots, positions, age):
        rows = masks(slots)
        if self.is_placed(stream):
            for index, mask in rows.items():
                self.blocks.setdefault((stream, index), Block()).write(mask)
        else:
            self.write_pages(stream, rows)
        for slot, position in zip(slots, positions or slots):
            block = self.blocks[stream, slot // BLOCK]
            block.age, block.last = age, max(block.last if block.age == age else 0, position)
            block.first = block.first or position < FIRST

    # Phases

    def fits(self, group, n_kv=0):
        used = [n for s, n in enumerate(self.n_kv) if self.group[s] == group]
        return max(n_kv, *used, 0) <= self.in_place

    def hand_over(self, group):
        """From its place into pages: all but the least part is sealed."""
        self.placed[group] = False
        self.count.hand_overs += 1
        least = self.least()
        for key, block in self.blocks.items():
            if self.group[key[0]] == group and block.exact and key not in least:
                self.count.handed_rows += count(block.exact)
                block.encode(block.exact)
        self.squeeze()

    def squeeze(self):
        while self.bytes() > self.budget and self.seal(1, ()):
            pass

    def leave_if_full(self, stream):
        if self.is_placed(stream) and not self.fits(self.group[stream]):
            self.hand_over(self.group[stream])

    def hindered(self, group, rows, visible):
        """Whether sealed rows keep the cache out of its place. Both: {(stream, block): mask}."""
        if self.back == "decode":
            return False
        for key, block in self.blocks.items():
            sealed = block.sealed & ~rows.get(key, 0)
            mine = self.group[key[0]] == group
            if mine and sealed and (self.back == "held" or sealed & visible.get(key, 0)):
                return True
        before, self.placed[group] = self.placed[group], True
        too_large = self.bytes() > self.budget  # with sealed rows that stay aside
        self.placed[group] = before
        return too_large

    def decode(self, group):
        for key, block in self.blocks.items():
            if self.group[key[0]] == group:
                self.count.decoded_rows += count(block.sealed)
                block.write(block.sealed)

    def choose_phase(self, group, n_kv, rows, visible):
        stays = self.fits(group, n_kv) and not self.hindered(group, rows, visible)
        if self.placed[group] and not stays:
            self.hand_over(group)
        elif not self.placed[group] and stays:
            self.placed[group] = True
            self.count.returns += 1
            if self.back == "decode":
                self.decode(group)

    # Events

    def used(self, event):
        """Cells up to the highest one that the stream is known to use."""
        return padded(
            max([end for _, end in event.visible] + [slot + 1 for slot in event.slots], default=0)
        )

    def step(self, events):
        """Lines of one graph; says whether it was served in place."""
        rows, visible = {}, {}
        for event in events:
            s = event.stream
            self.release(s, event.n_kv if self.n_streams == 1 else self.used(event))
            rows.update({(s, b): mask for b, mask in masks(event.slots).items()})
            visible.update({(s, b): mask for b, mask in range_masks(event.visible).items()})
        groups = {self.group[event.stream] for event in events}
        for group in groups:
            self.choose_phase(group, max(event.n_kv for event in events), rows, visible)
        for event in events:
            self.write(event.stream, event.slots, event.positions, event.step)
        for key, mask in visible.items():
            if key in self.blocks:
                self.blocks[key].seen, self.blocks[key].age = mask, events[0].step
        self.note_bytes()
        return all(self.placed[group] for group in groups)

    def outside(self, event):
        """A state is restored: rows without a mask, 512 at a time."""
        s = event.stream
        self.n_kv[s] = max(self.n_kv[s], self.used(event))
        self.leave_if_full(s)
        for i in range(0, len(event.slots), ROOM):
            self.write(s, event.slots[i : i + ROOM], None, event.step)
            self.note_bytes()

    def copy(self, event):
        to, start = event.stream, event.n_kv
        self.release(to, 0)
        self.n_kv[to] = self.n_kv[start]
        self.leave_if_full(to)
        for (stream, index), block in list(self.blocks.items()):
            if stream == start:
                copied = self.blocks[to, index] = Block()
                for name in Block.__slots__:
                    setattr(copied, name, getattr(block, name))
        self.squeeze()
        self.note_bytes()

    def shift(self, event):
        """Sealed blocks whose seen rows do not all move alike are written again."""
        by = dict(zip(event.slots, event.positions))
        for (stream, index), block in list(self.blocks.items()):
            rows = [i for i in range(BLOCK) if block.sealed & block.seen & 1 << i]
            moves = {by.get(index * BLOCK + i, 0) for i in rows}
            if stream == event.stream and len(moves) > 1 and not self.is_placed(stream):
                self.count.mixed_shifts += 1
                self.write_pages(stream, {index: sum(1 << i for i in rows)})
        self.note_bytes()


def steps(events):
    """The lines of one graph together, other lines alone; with the number of the first line."""
    i = 0
    while i < len(events):
        end = i + 1
        while (
            events[i].kind == "s"
            and end < len(events)
            and events[end].kind == "s"
            and events[end].step == events[i].step
        ):
            end += 1
        yield i, events[i:end]
        i = end


def alive(cache):
    """How many cells are alive at each event."""
    n = cache.n_streams * cache.n_cells
    written, seen = [-1] * n, [-1] * n
    change = [0] * (len(cache.events) + 1)

    def end(cell):
        if 0 <= written[cell] <= seen[cell]:
            change[written[cell]] += 1
            change[seen[cell] + 1] -= 1
        written[cell] = -1

    for i, event in enumerate(cache.events):
        base = event.stream * cache.n_cells
        copied = range(cache.n_cells) if event.kind == "p" else ()
        for cell in range(n) if event.kind == "z" else ():
            end(cell)
        for slot in event.slots if event.kind in "sw" else copied:
            end(base + slot)
            written[base + slot] = i
        for first, last in event.visible:
            seen[base + first : base + last] = [i] * (last - first)
    for cell in range(n):
        end(cell)
    total = 0
    return [total := total + by for by in change[:-1]]


def replay(cache, ratio, max_tokens, back, remap):
    """The table's figures for one cache."""
    max_tokens = max_tokens or cache.n_streams * cache.n_cells
    plan, living = Plan(cache, ratio, max_tokens, back, remap), alive(cache)
    served = {0.25: [0, 0], 0.5: [0, 0], 1: [0, 0]}
    for i, events in steps(cache.events):
        kind = events[0].kind
        if kind == "z":
            plan.clear()
        elif kind == "s":
            placed, n = plan.step(events), sum(len(event.slots) for event in events)
            fill = max(living[i : i + len(events)]) / max_tokens
            for most, counts in served.items():
                counts[0] += n if fill <= most or most == 1 else 0
                counts[1] += n if placed and (fill <= most or most == 1) else 0
        elif kind != "x":
            {"w": plan.outside, "p": plan.copy, "k": plan.shift}[kind](events[0])
    row = {
        "cache": cache.name,
        "streams": cache.n_streams,
        "cells": cache.n_cells,
        "max_tokens": max_tokens,
        "ratio": ratio,
        "back": back,
        "remap": remap,
        "in_place_cells": plan.in_place,
    }
    for name, most in (("quarter", 0.25), ("half", 0.5), ("all", 1)):
        n, placed = served[most]
        row[f"tokens_{name}"] = n
        row[f"in_place_{name}"] = round(placed / n, 3) if n else ""
    found = vars(plan.count)
    return (
        row
        | {name: n for name, n in found.items() if name != "peak"}
        | {"peak_of_budget": round(plan.count.peak, 3)}
    )


SHOWN = {
    "workload": 20,
    "cache": 5,
    "streams": 7,
    "cells": 6,
    "ratio": 5,
    "back": 6,
    "remap": 6,
    "tokens_all": 10,
    "tokens_quarter": 14,
    "in_place_quarter": 16,
    "in_place_half": 13,
    "in_place_all": 12,
    "hand_overs": 10,
    "returns": 7,
    "reopened": 8,
    "encoded_rows": 12,
    "decoded_rows": 12,
    "mixed_shifts": 12,
    "peak_of_budget": 14,
}


def print_table(rows):
    print(" ".join(f"{name:>{width}}" for name, width in SHOWN.items()))
    for row in rows:
        print(" ".join(f"{row[name]:>{width}}" for name, width in SHOWN.items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("traces", nargs="+", type=pathlib.Path)
    parser.add_argument(
        "--ratio", type=float, action="append", help="of sealed to f16 bytes (0.27)"
    )
    parser.add_argument("--max-tokens", type=int, help="-c, all streams (all cells)")
    parser.add_argument("--back", choices=["held", "seen", "decode"], action="append")
    parser.add_argument("--remap", choices=["no", "buffer", "stream"], action="append")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    choices = list(
        itertools.product(given.ratio or [0.27], given.back or ["held"], given.remap or ["no"])
    )
    paths = [
        path
        for given_path in given.traces
        for path in (sorted(given_path.glob("*.trace*")) if given_path.is_dir() else [given_path])
    ]
    rows = [
        {"workload": path.name.split(".")[0]} | replay(cache, ratio, given.max_tokens, back, remap)
        for path in paths
        for cache in trace_file.read(path)
        for ratio, back, remap in choices
        if remap == "no" or cache.n_streams > 1
    ]
    if given.json:
        json.dump(rows, sys.stdout, indent=1)
    else:
        print_table(rows)


if __name__ == "__main__":
    main()
