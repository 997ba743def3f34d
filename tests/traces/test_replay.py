"""bench/traces/replay.py on traces whose answers are computed by hand.

The hand-made cache has 1024 cells, and a sealed row takes a quarter of an f16 row. So:

    the least exact part   max(128, 1024 / 16) = 128 rows, 2 blocks
    room in place          (1024 - 128) / 4 + 128 = 352 rows, 256 as a multiple of 256
    the budget             352 + 512 = 864 rows
    exact pages            2 + 512 / 64 = 10
"""

import pathlib
import random
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "traces"))
import replay  # noqa: E402
import trace_file  # noqa: E402

NEW = "o 1 0 1 1024 - - -"

# A conversation of 300 tokens goes to pages at its second step. A second conversation takes its
# cells.
TALK = [
    NEW,
    "s 1 1 0 256 0+200 0+200 0+200",
    "s 1 2 0 512 200+100 200+100 0+300",
    "s 1 3 0 256 0+60 0+60 0+60",
    "s 1 4 0 256 60+190 60+190 0+250",
]

# 768 tokens. Blocks 0 to 3 are in place at first. Then blocks 1 and 2 are sealed. Block 0 has the
# first tokens, block 3 the newest. Then blocks 4 to 11 are exact, which makes 10 exact pages.
FULL = [NEW, "s 1 1 0 256 0+256 0+256 0+256", "s 1 2 0 768 256+512 256+512 0+768"]


def run(lines, back="held", remap="no", ratio=0.25):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "hand.trace"
        path.write_text("\n".join(["kvant-trace 1", *lines, ""]))
        caches = trace_file.read(path)
    return replay.replay(caches[0], ratio, None, back, remap)


class Phases(unittest.TestCase):
    def expect(self, row, **numbers):
        self.assertEqual({name: row[name] for name in numbers}, numbers)

    def test_room(self):
        self.expect(run(TALK), in_place_cells=256, max_tokens=1024)

    def test_fill(self):
        """A quarter of the cache is 256 cells. Only in the second step more cells are in use."""
        self.expect(run(TALK), tokens_all=550, tokens_half=550, tokens_quarter=450)

    def test_back_when_nothing_sealed_is_held(self):
        """Blocks 1 and 2, 128 rows, are sealed at the second step. The third step reads 256 cells.
        That frees block 4, but not blocks 1 and 2. The fourth step overwrites both.
        """
        self.expect(
            run(TALK),
            hand_overs=1,
            handed_rows=128,
            returns=1,
            reopened=0,
            in_place_all=round(390 / 550, 3),
            in_place_quarter=round(390 / 450, 3),
        )

    def test_back_when_nothing_sealed_is_seen(self):
        """The third step sees cells 0 to 59, and none of them is sealed."""
        self.expect(
            run(TALK, "seen"),
            hand_overs=1,
            returns=1,
            decoded_rows=0,
            in_place_all=round(450 / 550, 3),
            in_place_quarter=1.0,
        )

    def test_seen_again(self):
        """The fourth step sees sealed cells again, and then no block fits or is overwritten."""
        lines = TALK[:4] + ["s 1 4 0 256 60+1 60+1 0+61,130+1"]
        self.expect(run(lines, "seen"), hand_overs=2, returns=1, in_place_all=round(260 / 361, 3))

    def test_what_stays_aside_needs_room(self):
        """With 16384 cells the least part is 1024 rows. There is room for 4864 rows in place, and
        the budget is 5376. The first step is larger than any of these: its first 24 blocks are
        exact, all later ones sealed.

        With 4864 cells, blocks 24 to 75 would stay aside. They take 832 rows, 5696 together. With
        4352 cells, blocks 24 to 67 would stay aside. They take 704 rows, 5056 together.
        """
        lines = ["o 1 0 1 16384 - - -", "s 1 1 0 8192 0+8192 0+8192 0+8192"]
        self.expect(run(lines, "seen"), in_place_cells=4864, encoded_rows=8192 - 24 * 64)
        for n_kv, returns in ((4864, 0), (4352, 1)):
            more = f"s 1 2 0 {n_kv} 0+64 0+64 0+64"
            self.expect(run([*lines, more], "seen"), returns=returns)

    def test_back_at_once(self):
        self.expect(run(TALK, "decode"), returns=1, decoded_rows=128, in_place_quarter=1.0)

    def test_blocks_at_n_kv_are_free(self):
        """The third step seals blocks 3 to 10. The fourth step overwrites blocks 1 to 3. It reads
        256 cells, so later blocks hold no rows any more.
        """
        more = ["s 1 3 0 1024 768+256 768+256 0+1024", "s 1 4 0 256 64+192 64+192 0+256"]
        self.expect(run(FULL + more), returns=1)

    def test_bytes(self):
        """The first trace has 256 rows in place. The second trace has 10 exact blocks, which are
        640 rows. Its two sealed blocks take as much memory as 32 rows.
        """
        self.expect(run(TALK), peak_of_budget=round(256 / 864, 3))
        self.expect(run(FULL), peak_of_budget=round((640 + 32) / 864, 3))

    def test_clear(self):
        """A cleared cache is in place again."""
        self.expect(
            run(FULL + ["z 1 2 0 0 - - -", "s 1 3 0 256 0+9 0+9 0+9"]),
            hand_overs=1,
            in_place_all=round((256 + 9) / (768 + 9), 3),
        )

    def test_a_restored_state_may_not_fit(self):
        """300 rows are written outside of a graph: the cache goes to pages before the step."""
        row = run([NEW, "w 1 0 0 0 0+300 - -", "s 1 1 0 512 300+1 300+1 0+301"])
        self.expect(row, hand_overs=1, handed_rows=0, in_place_all=0.0)


class Pages(unittest.TestCase):
    expect = Phases.expect

    def test_reopened(self):
        """Two rows of block 1 make it exact again, once. All exact pages are in use, so blocks are
        sealed.
        """
        more = ["s 1 3 0 768 70+1 768+1 0+768", "s 1 4 0 768 71+1 769+1 0+768"]
        self.expect(run(FULL + more), reopened=1, encoded_rows=0)

    def test_overwritten(self):
        """All rows of a sealed block are new, so it does not count as reopened."""
        self.expect(run(FULL + ["s 1 3 0 768 64+64 768+64 0+768"]), reopened=0, encoded_rows=0)

    def test_no_exact_page_is_left(self):
        """The step writes a row in each of 12 blocks. It writes all blocks with exact pages, so
        none of them can be sealed. The rows of blocks 1 and 2 are encoded.
        """
        slots = ",".join(f"{64 * i}+1" for i in range(12))
        self.expect(run(FULL + [f"s 1 3 0 768 {slots} - 0+768"]), reopened=0, encoded_rows=2)

    def test_the_budget_holds(self):
        """Rule 1 if every cell is used and rows are replaced at random. If all 16 blocks were
        sealed next to 10 exact pages, there would be 896 rows.
        """
        chance = random.Random(5)
        lines = FULL + ["s 1 3 0 1024 768+256 768+256 0+1024"]
        for step in range(4, 200):
            slots = [chance.randrange(1024) for _ in range(chance.randrange(1, 12))]
            slots = ",".join(f"{slot}+1" for slot in dict.fromkeys(slots))
            lines.append(f"s 1 {step} 0 1024 {slots} - 0+1024")
        row = run(lines)
        self.assertGreater(row["peak_of_budget"], 0.9)
        self.assertLessEqual(row["peak_of_budget"], 1)

    def test_shifts(self):
        """In block 1, 37 of the 64 rows move. In block 2, all rows move by the same distance."""
        self.expect(run(FULL + ["k 1 2 0 0 64+37,128+64 -5*37,-9*64 -"]), mixed_shifts=1)

    def test_streams(self):
        """Two streams of 1024 cells: room for 608 rows, 256 for each stream if they are
        remapped.
        """
        lines = [
            "o 1 0 2 1024 - - -",
            "s 1 1 0 256 0+5 0+5 0+5",
            "s 1 1 1 256 0+3 0+3 0+3",
            "p 1 1 1 0 - - -",
            "s 1 2 1 256 5+2 5+2 0+7",
        ]
        self.expect(run(lines), in_place_all=0.0, in_place_cells=0, tokens_all=10)
        self.expect(run(lines, remap="buffer"), in_place_all=1.0, in_place_cells=256, hand_overs=0)

    def test_streams_by_themselves(self):
        """Stream 1 reads 512 cells at last. Alone, or together with stream 0, it goes to pages.
        Stream 0 stays in place if each stream is handled separately. It serves 4 of the 272 tokens
        there.
        """
        lines = [
            "o 1 0 2 1024 - - -",
            "s 1 1 0 256 0+5 0+5 0+5",
            "s 1 2 1 256 0+250 0+250 0+250",
            "s 1 3 1 512 250+13 250+13 0+263",
            "s 1 4 0 256 5+4 5+4 0+9",
        ]
        self.expect(run(lines, remap="buffer"), hand_overs=1, in_place_all=round(255 / 272, 3))
        self.expect(run(lines, remap="stream"), hand_overs=1, in_place_all=round(259 / 272, 3))


class Recorded(unittest.TestCase):
    def test_the_budget_holds(self):
        """Rule 1, in recorded traces, for all ways back to f16 in place and three codecs."""
        paths = sorted(pathlib.Path(__file__).parent.glob("*.trace"))
        self.assertEqual(len(paths), 3)
        for path in paths:
            for cache in trace_file.read(path):
                for back in ("held", "seen", "decode"):
                    for ratio in (0.14, 0.2, 0.27):
                        row = replay.replay(cache, ratio, None, back, "buffer")
                        self.assertGreater(row["tokens_all"], 100, path)
                        self.assertLessEqual(row["peak_of_budget"], 1, (path, row))


class Files(unittest.TestCase):
    def test_what_is_no_trace_is_refused(self):
        for line in (
            "s 1 1 0 256 0+5 0+5",
            "y 1 1 0 256 0+5 0+5 0+5",
            "s 2 1 0 256 0+5 0+5 0+5",
            "s 1 1 1 256 0+5 0+5 0+5",
            "s 1 1 0 256 1020+5 - 0+5",
            "s 1 1 0 256 -1+5 - -",
            "s 1 1 0 256 0+5 0+4 0+5",
            "s 1 1 0 2048 0+5 0+5 0+5",
            "s 1 1 0 256 5 - -",
            "s 1 1 0 256 0+5 0+5 1000+25",
            "s 1 1 0 256 0+0 - -",
        ):
            with self.assertRaisesRegex(ValueError, "hand.trace:3: "):
                run([NEW, line])
        with self.assertRaisesRegex(ValueError, "hand.trace:2: "):
            run(["kvant-trace 2"])

    def test_two_processes(self):
        """The second process begins a section, in which the numbers of caches begin again."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "two.trace"
            path.write_text(("\n".join(["kvant-trace 1", *TALK]) + "\n") * 2)
            self.assertEqual([len(cache.events) for cache in trace_file.read(path)], [4, 4])

    def test_table(self):
        path = ROOT / "bench" / "traces" / "replay.py"
        traces = sorted(pathlib.Path(__file__).parent.glob("*.trace"))
        done = subprocess.run(
            [sys.executable, path, traces[0], "--back", "held", "--back", "seen"],
            capture_output=True,
            text=True,
        )
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("in_place_quarter", done.stdout.splitlines()[0])


if __name__ == "__main__":
    unittest.main()
