"""A scheduler of random requests, and a cache whose rows are numbers, for tests of exact blocks."""

import random
from unittest import mock

import numpy as np
import torch

from kvant.vllm import exact

PAGE = 64


class Sequence:
    """Tokens of a request, with the blocks of its table. A token's identity is its number among all
    tokens that were ever written, so a row of another token is noticed.
    """

    def __init__(self, prompt):
        self.prompt, self.blocks, self.tokens = prompt, [], []


class Engine:
    """A scheduler that shares blocks as vLLM does, and a layer whose rows are numbers. `pages` and
    `pool` hold what the kernels would hold.
    """

    def __init__(self, seed, slots, device, n_blocks=48, most_staged=16):
        self.random = random.Random(seed)
        with mock.patch.object(exact, "MOST_STAGED", most_staged):
            self.state = exact.State(slots, n_blocks, 16, n_blocks, 2048, torch.device(device))
        self.free = list(range(1, n_blocks))
        self.pages = np.full(n_blocks * PAGE, -1, np.int64)
        self.pool = np.full((slots.first + slots.newest) * PAGE + most_staged, -1, np.int64)
        self.running, self.cached, self.written, self.steps = [], [], 0, 0

    def room_for(self, sequence, n):
        while len(sequence.blocks) * PAGE < n:
            if not self.free:
                return False
            # vLLM gives out the block that was freed first
            sequence.blocks.append(self.free.pop(0))
        return True

    def end(self, sequence, keep):
        """Ends or preempts a sequence. Its whole blocks may stay as a cached prefix."""
        self.running.remove(sequence)
        whole = len(sequence.tokens) // PAGE
        if keep and whole and len(self.cached) < 3:
            self.cached.append((sequence.blocks[:whole], sequence.tokens[: whole * PAGE]))
            self.free += [x for x in sequence.blocks[whole:] if not self.shared(x)]
        else:
            self.free += [x for x in sequence.blocks if not self.shared(x)]

    def shared(self, block):
        in_use = [blocks for blocks, _ in self.cached] + [x.blocks for x in self.running]
        return any(block in blocks for blocks in in_use)

    def begin(self):
        made = Sequence(self.random.choice([1, 30, 64, 65, 130, 200, 300]))
        if self.cached and self.random.random() < 0.5:
            blocks, tokens = self.random.choice(self.cached)
            if len(tokens) < made.prompt:
                made.blocks, made.tokens = list(blocks), list(tokens)
        self.running.append(made)

    def drop_prefix(self):
        blocks, _ = self.cached.pop(0)
        self.free += [x for x in blocks if not self.shared(x)]

    def plan(self):
        """Sequences of a step, with the tokens that each writes. The last tokens of a decode step
        may be drafts that are refused afterwards.
        """
        made = []
        for one in list(self.running):
            left = one.prompt - len(one.tokens)
            n = min(left, self.random.choice([7, 64, 100, 300])) if left > 0 else 1
            drafts = self.random.choice([0, 0, 3]) if left <= 0 else 0
            if not self.room_for(one, len(one.tokens) + n + drafts):
                self.end(one, keep=False)
                continue
            made.append((one, n, drafts))
        return [x for x in made if x[0] in self.running]

    def step(self):
        planned = self.plan()
        if not planned:
            return
        padded = [(one, 0, 0) for one, _, _ in planned[:1]]  # of a graph: no tokens
        starts, lengths, slots, ids = [0], [], [], []
        for one, n, drafts in planned + padded:
            first, last = len(one.tokens), len(one.tokens) + n + drafts
            slots += [one.blocks[t // PAGE] * PAGE + t % PAGE for t in range(first, last)]
            new = list(range(self.written, self.written + n + drafts))
            self.written += n + drafts
            one.tokens += new
            ids += new
            starts.append(len(slots))
            lengths.append(last if n else 0)
        slots += [-1, -1]
        table = np.zeros((len(lengths), self.state.table.shape[1]), np.int32)
        for row, (one, n, _) in zip(table, planned + padded):
            row[: len(one.blocks)] = one.blocks if n else 0
        arrays = [torch.tensor(x, dtype=torch.int32) for x in (starts, lengths)]
        arrays += [torch.from_numpy(table), torch.tensor(slots, dtype=torch.int64)]
        self.state.step(*(x.to(self.state.device) for x in arrays))
        self.layer(slots, ids)
        self.check(planned)
        for one, _, drafts in planned:
            one.tokens = one.tokens[: len(one.tokens) - self.random.randint(0, drafts)]
        self.steps += 1

    def layer(self, slots, ids):
        """Writes rows and seals listed rows, in the order of gpu_pages.LayerPages.write."""
        rows = self.state.rows[: len(slots)].tolist()
        n = int(self.state.n_sealed[0])
        from_, to = (x[:n].tolist() for x in (self.state.from_, self.state.to))
        staged = len(slots) <= self.state.most_staged
        assert len(set(to)) == len(to), "a slot is sealed twice"
        for slot, row, token in zip(slots, rows, [*ids, None, None]):
            if slot < 0:
                assert row == -1
                continue
            if not staged:
                self.pages[slot] = token
            assert row >= 0 or not staged
            if row >= 0:
                self.pool[row] = token
        for source, slot in zip(from_, to):
            self.pages[slot] = self.pool[source]

    def seen(self, i, length):
        """The tokens that attention of sequence i reads."""
        entries, made = self.state.table[i].tolist(), []
        for t in range(length):
            entry = entries[t // PAGE]
            at = self.pool if entry < 0 else self.pages
            made.append(int(at[(-1 - entry if entry < 0 else entry) * PAGE + t % PAGE]))
        return made

    def check(self, planned):
        for i, (one, _, _) in enumerate(planned):
            assert self.seen(i, len(one.tokens)) == one.tokens, (self.steps, i)

    def flush(self):
        """Seals everything, as before transforms change."""
        from_, to, n = (x.tolist() for x in self.state.everything())
        assert n[0] == len(to)
        for source, slot in zip(from_, to):
            self.pages[slot] = self.pool[source]
        self.state.forget()

    def run(self, steps):
        for _ in range(steps):
            draw = self.random.random()
            if len(self.running) < 6 and draw < 0.3:
                self.begin()
            elif self.running and draw < 0.36:
                self.end(self.random.choice(self.running), keep=draw < 0.34)
            elif self.cached and draw < 0.38:
                self.drop_prefix()
            elif draw < 0.39:
                self.flush()
            self.step()
