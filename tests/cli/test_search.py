"""kvant search: building, querying and measuring an index, and files of vectors with a wrong
format.
"""

import json
import math
import os
import random
import struct
import unittest

from testing import run, temporary_folder

OK, RUNTIME, USAGE = 0, 1, 2
DIM, N = 24, 200


def npy(rows, descr="<f4", order="False", content=None):
    shape = (len(rows), len(rows[0]))
    head = f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}"
    head += " " * (-(len(head) + 11) % 64) + "\n"
    return (
        b"\x93NUMPY\x01\x00"
        + struct.pack("<H", len(head))
        + head.encode()
        + (content or b"".join(struct.pack(f"<{len(r)}f", *r) for r in rows))
    )


def doubles(rows):
    """A file of float64 whose columns lie one after another."""
    columns = [number for column in zip(*rows) for number in column]
    return npy(rows, "<f8", "True", struct.pack(f"<{len(columns)}d", *columns))


def fvecs(rows):
    return b"".join(struct.pack(f"<i{len(r)}f", len(r), *r) for r in rows)


def fbin(rows):
    return struct.pack("<II", len(rows), len(rows[0])) + b"".join(
        struct.pack(f"<{len(r)}f", *r) for r in rows
    )


def closest(rows, query, k):
    return sorted(
        range(len(rows)), key=lambda i: -math.fsum(a * b for a, b in zip(rows[i], query))
    )[:k]


class Search(unittest.TestCase):
    def setUp(self):
        self.folder = temporary_folder(self.addCleanup)
        rng = random.Random(5)
        self.rows = [
            [struct.unpack("<f", struct.pack("<f", rng.gauss(0, 1)))[0] for _ in range(DIM)]
            for _ in range(N)
        ]
        self.base = self.write("base.npy", npy(self.rows))
        self.index = self.folder / "base.kvidx"

    def write(self, name, content):
        (self.folder / name).write_bytes(content)
        return self.folder / name

    def said(self, words, *arguments, code=RUNTIME):
        done = run("search", *arguments)
        self.assertEqual((done.returncode, done.stdout), (code, ""), done.stderr)
        self.assertIn(words, done.stderr)

    def test_every_kind_of_file(self):
        wanted = [closest(self.rows, query, 3) for query in self.rows[:4]]
        for name, content in (
            ("a.npy", npy(self.rows)),
            ("a.fvecs", fvecs(self.rows)),
            ("a.fbin", fbin(self.rows)),
            ("b.npy", doubles(self.rows)),
        ):
            done = run(
                "search",
                "build",
                self.write(name, content),
                self.index,
                "--json",
                "-c",
                "turboquant-8",
                code=OK,
            )
            info = json.loads(done.stdout)[0]
            self.assertEqual(
                (info["vectors"], info["dim"], info["bytes_per_vector"], info["id_bytes"]),
                (N, DIM, DIM + 4, 0),
            )
            self.assertEqual(self.index.stat().st_size, info["file_bytes"])
            found = json.loads(
                run(
                    "search", "query", self.index, self.base, *"-k 3 -n 4 --verify --json".split()
                ).stdout
            )
            self.assertEqual(
                [[row["id"] for row in found if row["query"] == q] for q in range(4)], wanted
            )
            self.assertEqual([row["rank"] for row in found], [1, 2, 3] * 4)

    def test_bytes(self):
        rows = [[i % 7, i // 7 % 7, 3] for i in range(49)]
        for name, content in (
            ("b.u8bin", struct.pack("<II", 49, 3) + bytes(sum(rows, []))),
            ("b.bvecs", b"".join(struct.pack("<i", 3) + bytes(row) for row in rows)),
        ):
            path = self.write(name, content)
            run(
                "search", "build", path, self.index, "--metric", "l2", "-c", "turboquant-8", code=OK
            )
            found = json.loads(run("search", "query", self.index, path, "-k", "1", "--json").stdout)
            self.assertGreater(sum(row["query"] == row["id"] for row in found), 40)

    def test_eval(self):
        done = run(
            "search",
            "eval",
            self.base,
            self.base,
            *"-c turboquant-8 -c turboquant-1 -c turboquant-2:dims=8 -k 5 -n 50".split(),
            "--json",
            code=OK,
        )
        rows = json.loads(done.stdout)
        self.assertEqual(
            [row["codec"] for row in rows], ["turboquant-8", "turboquant-1", "turboquant-2:dims=8"]
        )
        self.assertGreater(rows[0]["recall"], 0.95)
        self.assertGreater(rows[0]["recall"], rows[1]["recall"])
        self.assertEqual([row["queries"] for row in rows], [50] * 3)
        exact = json.loads(
            run(
                "search",
                "eval",
                self.base,
                self.base,
                *"-c turboquant-1 -m l2 --rerank".split(),
                N,
                "--json",
            ).stdout
        )
        self.assertEqual(exact[0]["recall"], 1)

    def test_damaged_files(self):
        good = npy(self.rows)
        for name, content, words in (
            ("c.npy", good[:-1], "c.npy: it is damaged"),
            ("c.npy", good + b"\0", "its size is not the size that its header states"),
            ("c.npy", b"\x93NUMPY\x01\x00\xff\xff{}", "c.npy: it is damaged"),
            ("c.npy", good.replace(b"(200, 24)", b"(9999999999999999999, 24)"), "c.npy: "),
            ("c.npy", good.replace(b"(200, 24)", b"(4800,)  "), "rows of numbers"),
            ("c.npy", b"", "not a .npy file"),
            ("c.npy", good.replace(b"(200, 24)", b"(0, 24)  ")[:128], "it has no vectors"),
            ("c.fbin", struct.pack("<II", 0, 24), "it has no vectors"),
            ("c.fbin", struct.pack("<II", 0, 24) + bytes(96), "its size"),
            ("c.fvecs", struct.pack("<i", 9000) + bytes(36000), "9000 dimensions"),
            ("c.fvecs", fvecs([[1, 2], [3, 4]])[:-1], "not a whole number of rows"),
            ("c.fvecs", fvecs([[1, 2]]) + struct.pack("<iff", 3, 0, 0), "rows differ in length"),
            ("c.fbin", struct.pack("<II", 2**32 - 1, 2**31), "its size"),
            ("c.fbin", struct.pack("<I", 1), "its size"),
            ("c.txt", b"1 2", "must end with .npy"),
        ):
            self.said(words, "build", self.write(name, content), self.index)
        self.said("nowhere.npy: No such file", "build", self.folder / "nowhere.npy", self.index)
        self.assertFalse(self.index.exists())
        self.said("NaN", "build", self.write("c.npy", npy([[math.nan] * 4])), self.index)
        self.assertEqual(run("search", "build", self.base, self.index).returncode, OK)
        damaged = bytearray(self.index.read_bytes())
        damaged[-100] ^= 1
        self.index.write_bytes(damaged)
        self.said("checksum", "query", self.index, self.base, "--verify")
        self.said("checksum", "query", self.index, self.base)
        self.index.write_bytes(damaged[:-64])
        self.said("cut short", "info", self.index)

    def test_mistakes(self):
        self.said("must be build, query, info or eval", code=USAGE)
        self.said("did you mean 'query'?", "qurey", self.index, self.base, code=USAGE)
        self.said("takes 2 files, not 1", "build", self.base, code=USAGE)
        self.said("files, not 3", "eval", self.base, self.base, self.base, code=USAGE)
        self.said("there is no codec 'float'", "build", self.base, self.index, "-c", "float-4")
        self.said("is a folder", "build", self.base, self.index.parent)
        self.said("ip, cosine or l2", "build", self.base, self.index, "-m", "dot")
        self.said(
            "but an index has one",
            "build",
            self.base,
            self.index,
            *"-c turboquant-4 -c turboquant-2".split(),
        )
        self.assertEqual(run("search", "build", self.base, self.index).returncode, OK)
        self.said(
            "queries have 2 dimensions, but vectors have 24",
            "query",
            self.index,
            self.write("q.fvecs", fvecs([[1, 2]])),
        )
        self.said("query takes no --metric", "query", self.index, self.base, "-m", "l2", code=USAGE)
        self.said(
            "build takes no --neighbors", "build", self.base, self.index, "-k", "3", code=USAGE
        )
        self.said("cpu or cuda", "query", self.index, self.base, "--device", "gpu", code=USAGE)
        self.said("rows=int8", "query", self.index, self.base, "--rerank", "20")

    def test_allowed_ids(self):
        self.assertEqual(run("search", "build", self.base, self.index).returncode, OK)
        found = json.loads(
            run(
                "search",
                "query",
                self.index,
                self.base,
                *"-n 2 --json --allow".split(),
                self.write("ids", b" 7\n\n150\r\n99999\n7"),
            ).stdout
        )
        self.assertEqual(
            [sorted(row["id"] for row in found if row["query"] == q) for q in range(2)],
            [[7, 150]] * 2,
        )
        for content, words in (
            (b"7\nx1\n", "line 2: 'x1' is not an id"),
            (b"-7", "not from 0"),
            (b"99999999999999999999", "not from 0"),
        ):
            self.said(words, "query", self.index, self.base, "--allow", self.write("ids", content))

    @unittest.skipUnless(os.environ.get("CUDA_HOST"), "no mock of a GPU")
    def test_on_a_gpu(self):
        gpu = {"KVANT_CUDA_LIBRARY": os.environ["CUDA_HOST"]}
        self.assertEqual(
            run("search", "build", self.base, self.index, "-c", "trellis-2").returncode, OK
        )
        ask = ("search", "query", self.index, self.base, "-n", "20", "--json")
        found = run(*ask, "--device", "cuda", **gpu)
        self.assertEqual((found.returncode, found.stdout), (OK, run(*ask).stdout), found.stderr)
        measured = run(
            "search",
            "eval",
            self.base,
            self.base,
            *"-c turboquant-4 --device cuda --json".split(),
            **gpu,
        )
        self.assertEqual(json.loads(measured.stdout)[0]["device"], "cuda")
        missing = run(*ask, "--device", "cuda", KVANT_CUDA_LIBRARY="/nowhere.so")
        self.assertEqual((missing.returncode, missing.stdout), (RUNTIME, ""))
        self.assertIn("/nowhere.so", missing.stderr)


if __name__ == "__main__":
    unittest.main()
