"""kvant state info: files of saved states with rows that are codes, written here from the format's
page (docs/reference/format.md, "Saved states").
"""

import struct
import unittest

from testing import run, temporary_folder


OK, RUNTIME, USAGE = 0, 1, 2
START, PRIME, MASK = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1


def fnv1a(data):
    state = START
    for byte in data:
        state = (state ^ byte) * PRIME & MASK
    return state


def step(state, word):
    state = (state ^ word) * PRIME & MASK
    return state ^ state >> 32


def checksum(data):
    """Four sums, each of every fourth word, and then the sum of their number of bytes and of the
    four sums."""
    lanes = [START + i for i in range(4)]
    whole = data + bytes(-len(data) % 32)
    for i in range(0, len(whole), 8):
        word = int.from_bytes(whole[i : i + 8], "little")
        lanes[i // 8 % 4] = step(lanes[i // 8 % 4], word)
    state = step(START, len(data))
    for lane in lanes:
        state = step(state, lane)
    return state


def run_of_codes(cells, room):
    """`room` bytes of `cells` rows of a block, as codes and zeros."""
    record = b"\xffKVNREC2" + bytes(range(200))
    record += checksum(record).to_bytes(8, "little")
    lists = struct.pack("<QII", (1 << cells) - 1, 0, 0) + struct.pack("<IBBH", 0, 0, cells, 0)
    size = 40 + len(lists) + len(record)
    parts = b"\xff\x7fKVSTA1", struct.pack("<Q", size), struct.pack("<IIII", cells, 1, 1, 0)
    check = fnv1a(parts[0] + parts[1] + bytes(8) + parts[2] + lists)
    head = parts[0] + parts[1] + struct.pack("<Q", check) + parts[2]
    return (head + lists + record).ljust(room, b"\0"), size


class State(unittest.TestCase):
    def setUp(self):
        self.folder = temporary_folder(self.addCleanup)
        self.path = self.folder / "slot.bin"

    def info(self, data):
        self.path.write_bytes(data)
        return run("state", "info", self.path)

    def state(self, *parts):
        """A state of 9 tokens with odd bytes between its parts, as llama.cpp puts them."""
        return struct.pack("<III", 0x67677371, 2, 9) + b"\xff\x7f\xff" + b"\1\2\3".join(parts)

    def test_codes_and_zeros_are_counted(self):
        one, size = run_of_codes(20, 3 << 20)
        two, _ = run_of_codes(7, 100000)
        done = self.info(self.state(one, b"rows" * 1000, two))
        self.assertEqual((done.returncode, done.stderr), (OK, ""))
        self.assertIn(
            f"{self.path}: 9 tokens, {(len(one) + len(two) + 4021) / 2**20:.2f} MiB", done.stdout
        )
        self.assertIn(f"codes  {2 * size / 2**20:.2f} MiB in 2 runs of 27 rows", done.stdout)
        self.assertIn("zeros  3.09 MiB", done.stdout)

    def test_rows_of_fp16_are_a_state_too(self):
        done = self.info(self.state(b"rows" * 1000))
        self.assertEqual((done.returncode, done.stderr), (OK, ""))
        self.assertIn("codes  0.00 MiB in 0 runs of 0 rows", done.stdout)

    def test_damaged_codes_are_named(self):
        one, size = run_of_codes(20, 4096)
        for at in range(8, size):
            data = bytearray(self.state(one))
            data[15 + at] ^= 1
            if at % 7 and at > 80:
                continue
            done = self.info(data)
            self.assertEqual(done.returncode, RUNTIME, at)
            self.assertIn("1 runs of codes are damaged, the first at byte 15;", done.stderr)

    def test_states_that_are_cut_short_are_damaged(self):
        one, size = run_of_codes(20, 4096)
        for length in (15 + 8, 15 + 39, 15 + 40, 15 + size - 1):
            self.assertEqual(self.info(self.state(one)[:length]).returncode, RUNTIME, length)
        self.assertEqual(self.info(self.state(one)[: 15 + size]).returncode, OK)

    def packed(self, all_sequences=0):
        """A packed state of 9 tokens, with a run of 20 rows."""
        one, size = run_of_codes(20, 100000)
        check = checksum(one[:64] + one[size - 8 : size])
        body = struct.pack("<QQQQ", 3, size, len(one), check) + bytes(40) + b"\1\2\3"
        counts = struct.pack("<IIII", 1, 9, all_sequences, 0)
        parts = b"\xffKVPACK1" + struct.pack("<QQ", 48 + len(body) + size, 3 + len(one))
        whole = parts + bytes(8) + counts + body
        return parts + struct.pack("<Q", checksum(whole)) + counts + body + one[:size], size

    def test_packed_states_are_shown(self):
        for all_sequences in (0, 1):
            data, size = self.packed(all_sequences)
            done = self.info(data)
            self.assertEqual((done.returncode, done.stderr), (OK, ""))
            which = ", all sequences" if all_sequences else ""
            self.assertIn(f"{self.path}: 9 tokens{which}, 0.00 MiB", done.stdout)
            self.assertIn("packed 0.10 MiB of llama.cpp's", done.stdout)
            self.assertIn("in 1 runs of 20 rows", done.stdout)

    def test_damaged_packed_states_are_refused(self):
        data, _ = self.packed()
        for at in range(8, len(data), 5):
            done = self.info(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            self.assertEqual(done.returncode, RUNTIME, at)
            self.assertIn("the packed state is damaged or cut short", done.stderr)
        for length in (12, 47, 48, len(data) - 1):
            self.assertEqual(self.info(data[:length]).returncode, RUNTIME, length)

    def test_other_files_are_refused(self):
        for data in (b"", b"ggsq", b"GGUF" + bytes(100)):
            done = self.info(data)
            self.assertEqual(done.returncode, RUNTIME)
            self.assertIn(f"kvant: {self.path}: not a state that llama.cpp saved", done.stderr)
        self.assertEqual(run("state", "info", "/nowhere/slot.bin").returncode, RUNTIME)
        self.assertEqual(run("state", "info", self.folder).returncode, RUNTIME)

    def test_usage(self):
        for words in ([], ["info"], ["pack", "file"]):
            self.assertEqual(run("state", *words).returncode, USAGE, words)
        self.assertIn("usage: kvant state info FILE...", run("state", "--help").stdout)


if __name__ == "__main__":
    unittest.main()
