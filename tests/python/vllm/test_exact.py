"""Exact blocks of vLLM's sequences: which blocks are exact, that no row is ever lost or mixed up,
and attention over them. Runs on a GPU, or on the mock (tests/cuda/host) that KVANT_CUDA_LIBRARY
names.
"""

import functools
import pathlib
import sys
import tempfile
import types
import unittest
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "pytorch")]

import models  # noqa: E402
import torch  # noqa: E402
from common import TestCase, np  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402

import kvant  # noqa: E402
from kvant.vllm import codecs, exact, learn  # noqa: E402
from schedules import PAGE, Engine  # noqa: E402
from steps import (  # noqa: E402
    BLOCKS,
    DEVICE,
    DIM,
    HEADS,
    KV_HEADS,
    attention,
    made_builder,
    made_impl,
    made_memory,
    round_trip,
)


class Rules(TestCase):
    def test_no_row_is_lost(self):
        """Random schedules: chunked prompts, decoding with drafts, prefixes that are found again,
        preemption, blocks that are used again, and pools of several sizes.
        """
        for seed in range(12):
            slots = exact.Slots(*((4, 4), (4, 9), (6, 16))[seed % 3])
            engine = Engine(seed, slots, DEVICE, most_staged=(0, 16, 400)[seed // 3 % 3])
            engine.run(150)
            self.assertGreater(engine.written, 1000)

    def entries(self, state, i, n):
        return [x < 0 for x in state.table[i, :n].tolist()]

    def run_one(self, state, prompt, decodes, blocks):
        """One sequence: a prompt in one step, then single tokens. Yields after each step."""
        table = torch.zeros(1, state.table.shape[1], dtype=torch.int32)
        table[0, : len(blocks)] = torch.tensor(blocks)
        at = 0
        for n in [prompt] + [1] * decodes:
            slots = [blocks[t // PAGE] * PAGE + t % PAGE for t in range(at, at + n)]
            at += n
            arrays = [torch.tensor(x, dtype=torch.int32) for x in ([0, n], [at])]
            arrays += [table, torch.tensor(slots, dtype=torch.int64)]
            state.step(*(x.to(DEVICE) for x in arrays))
            yield at

    def test_first_and_newest_blocks_are_exact(self):
        state = exact.State(exact.Slots(4, 16), 40, 4, 40, 2048, torch.device(DEVICE))
        for at in self.run_one(state, 300, 500, list(range(1, 16))):
            n = -(-at // PAGE)
            found = self.entries(state, 0, n)
            self.assertTrue(found[0])
            self.assertTrue(all(found[-exact.NEWEST :]), at)
            # one more until it is sealed, and it is still read in that step
            self.assertLessEqual(sum(found), 1 + exact.NEWEST + 2)

    def test_sequences_that_begin_blocks_together(self):
        """The newest block of each sequence is exact, also if there is room for little more, and
        all sequences need new slots in one step.
        """
        n, width = 6, 8
        for apart in (0, 11):  # tokens
            state = exact.State(exact.Slots(8, 9), 64, n, width, 2048, torch.device(DEVICE))
            table = torch.arange(1, n * width + 1, dtype=torch.int32).view(n, width)
            lengths = torch.tensor([80 + apart * i for i in range(n)], dtype=torch.int32)
            counts = lengths.clone()
            for _ in range(300):
                tokens = [torch.arange(a - q, a) for a, q in zip(lengths.tolist(), counts.tolist())]
                slots = torch.cat(
                    [row.long()[t // PAGE] * PAGE + t % PAGE for row, t in zip(table, tokens)]
                )
                starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
                state.step(*(x.to(DEVICE) for x in (starts, lengths, table, slots)))
                for i, length in enumerate(lengths.tolist()):
                    self.assertTrue(
                        self.entries(state, i, width)[(length - 1) // PAGE], (i, length)
                    )
                    self.assertTrue(self.entries(state, i, width)[0])
                lengths, counts = lengths + 1, torch.ones_like(counts)

    def test_a_prompt_in_the_middle_of_a_block(self):
        """A block whose row 0 was written before the state knew of it has no copy."""
        state = exact.State(exact.Slots(4, 4), 8, 4, 8, 64, torch.device(DEVICE))
        table = torch.arange(8, dtype=torch.int32).repeat(1, 1)
        slots = torch.tensor([3 * PAGE + 5])
        starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [3 * PAGE + 6]))
        state.step(*(x.to(DEVICE) for x in (starts, lengths, table, slots)))
        self.assertEqual(self.entries(state, 0, 4), [False] * 4)
        self.assertEqual(state.rows[0].item(), 8 * PAGE)  # staged
        self.assertEqual(int(state.n_sealed), 1)
        self.assertEqual(state.to[0].item(), slots[0].item())

    def test_steps_that_are_too_large(self):
        state = exact.State(exact.Slots(4, 4), 8, 1, 8, 8, torch.device(DEVICE))
        zeros = torch.zeros(2, 8, dtype=torch.int32, device=DEVICE)
        with self.assertRaisesRegex(RuntimeError, "KVANT_VLLM_EXACT=0"):
            state.step(zeros[0, :3], zeros[0, :2], zeros, zeros[0].long())


class Attention(TestCase):
    """Sequences over several steps, with kernels or the mock. After each step, attention has to be
    what float64 computes from rows: of exact blocks the model's own, of other blocks as the codecs
    keep them.
    """

    # tokens of each sequence at the steps' ends: chunks of prompts, then decode steps
    STEPS = (
        [(40, 0, 0), (130, 30, 0), (131, 62, 300), (132, 63, 301)]
        + [(133 + i, 64 + i, 302 + i) for i in range(70)]
        + [(203, 134, 372), (303, 134, 373), (304, 140, 374)]
    )

    def setUp(self):
        """Presets learn in these steps. What they learn must not reach other tests."""
        for owner, name, value in (
            (learn, "learners", []),
            (codecs.learned, "calibration", None),
        ):
            patch = mock.patch.object(owner, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def begin(self, stored, dtype, calibration=None, slots=(4, 5), layer=1):
        made = made_impl(stored, calibration)
        made.pool = exact.Pool(exact.Slots(*slots), KV_HEADS, DIM, torch.device(DEVICE))
        state = exact.State(made.pool.slots, BLOCKS, 4, 8, 512, torch.device(DEVICE))
        builder = made_builder()
        builder._state = lambda common: state
        memory, random = made_memory(made, layer), torch.Generator().manual_seed(3)
        order = torch.randperm(BLOCKS - 1, generator=random) + 1
        table = order[:24].view(3, 8).to(torch.int32)
        shape = 3, 8 * PAGE, KV_HEADS, DIM
        rows = [(torch.randn(shape, generator=random) + 0.3).to(dtype) for _ in "kv"]
        return types.SimpleNamespace(
            impl=made,
            state=state,
            builder=builder,
            memory=memory,
            table=table,
            rows=rows,
            random=random,
            dtype=dtype,
            layer=types.SimpleNamespace(layer_name=f"model.layers.{layer}.attn"),
        )

    def step(self, it, before, after):
        """Runs a step; returns queries and outputs, and the rows of q of each sequence."""
        active = [i for i in range(3) if after[i] > before[i]]
        tokens = [range(before[i], after[i]) for i in active]
        slots = [
            int(it.table[i, t // PAGE]) * PAGE + t % PAGE
            for i, at in zip(active, tokens)
            for t in at
        ]
        starts = np.cumsum([0, *map(len, tokens)])
        k, v = (
            torch.cat([x[i, at.start : at.stop] for i, at in zip(active, tokens)]) for x in it.rows
        )
        q = torch.randn(len(slots), HEADS, DIM, generator=it.random).to(it.dtype)
        lengths = torch.tensor([after[i] for i in active], dtype=torch.int32)
        starts_cpu = torch.tensor(starts, dtype=torch.int32)
        padded = torch.tensor([*slots, -1, -1])
        common = CommonAttentionMetadata(
            query_start_loc=starts_cpu.to(DEVICE),
            query_start_loc_cpu=starts_cpu,
            seq_lens=lengths.to(DEVICE),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(active),
            num_actual_tokens=len(slots),
            max_query_len=max(map(len, tokens)),
            max_seq_len=int(lengths.max()),
            block_table_tensor=it.table[active].to(DEVICE),
            slot_mapping=padded.to(DEVICE),
        )
        metadata = it.builder.build(0, common)

        def pad(x):  # as a graph's batch has more tokens
            return torch.cat([x, torch.full_like(x[:1], 7).expand(2, -1, -1)]).to(DEVICE)

        q, k, v = map(pad, (q, k, v))
        out = torch.full_like(q, float("nan")).reshape(len(q), -1)
        it.impl.forward(it.layer, q, k, v, it.memory, metadata, out)
        found = out.view(-1, HEADS, DIM)[: len(slots)].float().cpu().numpy()
        return metadata, active, q[: len(slots)].cpu(), found, starts

    def run_steps(self, it, expected_rows, unit, between=None):
        """between: called once, between two steps."""
        before, n_exact, n_sealed = (0, 0, 0), 0, 0
        for number, after in enumerate(self.STEPS):
            if between and number == 40:
                between()
            metadata, active, q, found, starts = self.step(it, before, after)
            for j, i in enumerate(active):
                n = -(-after[i] // PAGE)
                entries = it.state.table[j, :n].cpu()
                n_exact += int((entries < 0).sum())
                n_sealed += int((entries >= 0).sum())
                rows = expected_rows(it, i, after[i], entries)
                own = slice(starts[j], starts[j + 1])
                expected = attention(q[own], *rows)
                self.assertTrue(np.isfinite(found[own]).all())
                self.assertLess(
                    np.abs(found[own] - expected).max(), unit * np.abs(expected).max(), (after, i)
                )
            before = after
        self.assertGreater(n_exact, 100)
        self.assertGreater(n_sealed, 100)

    def test_rows_without_a_rotation(self):
        """fp16 rows that no transform changes: exact blocks hold them bit for bit, so pages hold
        what the codec makes of them.
        """

        def rows_of(it, i, n, entries):
            own = [x[i, :n].float().numpy() for x in it.rows]
            kept = round_trip(it.impl)(*(torch.from_numpy(x) for x in own))
            exact_ = (entries < 0).repeat_interleave(PAGE)[:n, None, None].numpy()
            return [np.where(exact_, x, y) for x, y in zip(own, kept)]

        stored = "int-4:rotate=none/int-4:rotate=none"
        unit = 2.0**-9 if DEVICE == "cpu" else 2.0**-7
        self.run_steps(self.begin(stored, torch.float16), rows_of, unit)

    def decoded(self, it, i, n, entries, least=2.0**-7):
        """Rows that decode kernels read from pages and from exact blocks. least: by so much some
        row of a page differs from the model's.
        """
        blocks = it.table[i, : len(entries)].to(DEVICE)
        zeros = torch.zeros(0, KV_HEADS, DIM, dtype=torch.float16, device=DEVICE)
        found = it.impl.pages.rows(blocks, n, zeros, zeros, entries.to(DEVICE))
        parts = [[x.float().cpu().numpy() for x in (k, v)] for _, k, v in found]
        kept = [np.concatenate(x, 1)[:n] for x in zip(*parts)]
        own = [x[i, :n].float().numpy() for x in it.rows]
        exact_ = (entries < 0).repeat_interleave(PAGE)[:n].numpy()
        for x, y in zip(own, kept):
            error = np.abs(x - y).max((1, 2)) / np.abs(x).max()
            self.assertLess(error[exact_].max(initial=0), 2.0**-7)
            self.assertLess(error.max(), 0.5)
            if not exact_.all():
                self.assertGreater(error[~exact_].max(), least)
        return kept

    def test_codecs(self):
        for stored in ("turboquant4", "trellis4", "int4", "trellis-3/trellis-3"):
            with self.subTest(stored):
                unit = 2.0**-5 if "turbo" in stored else 2.0**-7
                it = self.begin(stored, torch.bfloat16)
                self.run_steps(it, self.decoded, unit)

    def test_calibrated(self):
        model = models.make("llama", head_dim=DIM)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "model.kvcal")
            kvant.calibrate(model, np.random.default_rng(1).integers(3, 300, 512)).save(path)
            for stored in ("balanced", "fast"):
                with self.subTest(stored):
                    it = self.begin(stored, torch.bfloat16, calibration=path)
                    self.run_steps(it, self.decoded, 2.0**-5)

    def test_transforms_that_are_learned(self):
        """Exact blocks hold rows of the first transforms, so they are sealed before transforms
        change.
        """
        it = self.begin("int-8:transform=file,sink=0/int-8:center=file,sink=0", torch.float16)
        it.impl.stored = it.impl.stored._replace(learns=True)
        it.rows[0] += torch.linspace(-20, 20, DIM)

        def relearn():
            calibrator, queries = kvant.Calibrator(model="rows"), torch.randn(200, HEADS, DIM)
            for layer in (0, 1):
                for role, rows in zip("kv", it.rows):
                    calibrator.add_rows(layer, role, rows.flatten(0, 1).float().numpy())
            for head in range(KV_HEADS):
                calibrator.add_queries(1, head, queries[:, head].numpy())
            codecs.learned.calibration = calibrator.finish()
            it.impl.pages.relearn(it.memory)
            it.impl.pages.forget()
            self.assertEqual(int((it.state.owners >= 0).sum()), 0)

        self.run_steps(it, functools.partial(self.decoded, least=0), 2.0**-6, relearn)

    def test_steps_that_nobody_planned(self):
        """Rows that come without a plan, and layers that attend to another layer's pages."""
        it = self.begin("int-8/int-8", torch.float16)
        state, step = it.state, it.builder._state
        apart = types.SimpleNamespace(plans=0)

        def sometimes(common):
            apart.plans += 1
            return state if apart.plans % 3 else None

        it.builder._state = sometimes
        tables = []

        def rows_of(it, i, n, entries):
            entries = state.entries_of(it.table[i, : len(entries)].to(DEVICE)).cpu()
            tables.append(entries)
            return self.decoded(it, i, n, entries, least=0)

        self.run_steps(it, rows_of, 2.0**-7)
        self.assertTrue(any((x < 0).any() for x in tables))
        it.builder._state = step

    def test_rows_that_are_refused(self):
        """A row of NaNs reads as zeros, in a prompt and in a decode step, and another sequence's
        row does not come back in a slot that is used again.
        """
        it = self.begin("turboquant4", torch.float16)
        for rows in it.rows:
            rows[0, [70, 131, 150]] = float("nan")

        def zeros_there(it, i, n, entries):
            raw, it.rows = it.rows, [torch.nan_to_num(x) for x in it.rows]
            kept = self.decoded(it, i, n, entries)
            it.rows = raw
            if i == 0:
                for x in kept:
                    self.assertEqual(
                        np.abs(x[[t for t in (70, 131, 150) if t < n]]).max(initial=0), 0
                    )
            return kept

        it.impl.pool.rows.fill_(3)  # of other sequences
        self.run_steps(it, zeros_there, 2.0**-5)

    def test_codecs_that_search(self):
        for value, wanted in (("", (True, True, False)), ("0", (False,) * 3), ("1", (True,) * 3)):
            with mock.patch.dict("os.environ", KVANT_VLLM_EXACT=value):
                pairs = (
                    ("trellis-4:x", "int-8"),
                    ("int-8", "trellis-3"),
                    ("int-4", "turboquant-4"),
                )
                self.assertEqual(tuple(exact.is_wanted(*pair) for pair in pairs), wanted)

    def test_codecs_that_cannot(self):
        for spec, possible in (
            ("trellis-4", True),
            ("f16", False),
            ("f32", False),
            ("kivi-2", False),
        ):
            made = [kvant.Codec(spec, DIM, role) for role in "kv"]
            self.assertEqual(exact.is_possible(made), possible, spec)


if __name__ == "__main__":
    unittest.main()
