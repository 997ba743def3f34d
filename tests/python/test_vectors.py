"""Files of vectors that this test writes byte by byte, and files that are refused."""

import io
import pathlib
import struct
import tempfile
import unittest

from common import TestCase, normal, np

import kvant

try:
    import h5py
except ImportError:
    h5py = None


class Files(TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.rows = normal(1, 7, 5)

    def write(self, name, data):
        path = self.folder / name
        path.write_bytes(data)
        return path

    def same(self, path, rows, **named):
        found = kvant.read_vectors(path, **named)
        self.assertEqual((found.dtype, found.shape), (np.float32, rows.shape))
        np.testing.assert_array_equal(found, rows)

    def test_npy(self):
        np.save(self.folder / "a.npy", self.rows)
        self.same(self.folder / "a.npy", self.rows)
        self.same(self.folder / "a.npy", self.rows[2:5], first=2, n=3)
        longer = self.write("longer.npy", (self.folder / "a.npy").read_bytes() + b"\0")
        self.refused(ValueError, "longer.npy|its size", kvant.read_vectors, longer)
        np.save(self.folder / "b.npy", self.rows.astype(np.float16))
        self.same(self.folder / "b.npy", self.rows.astype(np.float16).astype(np.float32))
        np.save(self.folder / "c.npy", self.rows[0])
        self.refused(ValueError, "c.npy|shape [5]", kvant.read_vectors, self.folder / "c.npy")
        np.save(self.folder / "d.npy", np.array([["a"]]))
        self.refused(ValueError, "d.npy|rows of numbers", kvant.read_vectors, self.folder / "d.npy")
        np.save(self.folder / "e.npy", np.array([{}]), allow_pickle=True)
        self.refused(ValueError, "", kvant.read_vectors, self.folder / "e.npy")

    def test_vecs(self):
        data = b"".join(struct.pack("<i5f", 5, *row) for row in self.rows.tolist())
        self.same(self.write("a.fvecs", data), self.rows)
        self.same(self.folder / "a.fvecs", self.rows[6:], first=6)
        self.same(self.write("empty.fvecs", b""), np.empty((0, 0), np.float32))
        small = np.arange(35, dtype=np.uint8).reshape(7, 5)
        self.same(
            self.write("a.bvecs", b"".join(struct.pack("<i5B", 5, *row) for row in small.tolist())),
            small,
        )
        for damaged in (data[:-1], data[:3], b"\0" * 8, struct.pack("<i", -1) + data, b"\xff" * 48):
            self.refused(
                ValueError, "b.fvecs|rows of", kvant.read_vectors, self.write("b.fvecs", damaged)
            )
        other = struct.pack("<i5f", 5, *[0] * 5) + struct.pack("<i5f", 4, *[0] * 5)
        self.refused(
            ValueError, "differ in length", kvant.read_vectors, self.write("c.fvecs", other)
        )

    def test_bin(self):
        head = struct.pack("<II", 7, 5)
        self.same(self.write("a.fbin", head + self.rows.tobytes()), self.rows)
        small = np.arange(35).reshape(7, 5)
        self.same(self.write("a.u8bin", head + small.astype("u1").tobytes()), small)
        self.same(self.write("a.i8bin", head + (small - 20).astype("i1").tobytes()), small - 20)
        self.same(self.write("a.f16bin", head + small.astype("<f2").tobytes()), small)
        for damaged in (
            head,
            head[:5],
            head + self.rows.tobytes() + b"\0",
            struct.pack("<II", 2**32 - 1, 2**32 - 1),
        ):
            self.refused(
                ValueError, "b.fbin|its size", kvant.read_vectors, self.write("b.fbin", damaged)
            )

    def test_float32_is_not_copied(self):
        path = self.write("a.fbin", struct.pack("<II", 7, 5) + self.rows.tobytes())
        self.assertIsInstance(kvant.read_vectors(path), np.memmap)

    def test_what_else_is_refused(self):
        self.refused(ValueError, "a.txt|.fvecs", kvant.read_vectors, self.write("a.txt", b""))
        self.refused(OSError, "b.npy", kvant.read_vectors, self.folder / "b.npy")
        self.refused(ValueError, "first -1", kvant.read_vectors, self.folder / "b.npy", first=-1)

    def test_npy_files_that_are_none(self):
        """Whatever NumPy raises, the error is a ValueError that names the file."""
        several, one, whole = (io.BytesIO() for _ in range(3))
        np.savez(several, a=self.rows, b=self.rows)
        np.save(one, np.float32(3))
        np.save(whole, self.rows)
        for i, data in enumerate(
            (
                b"",
                b"a text",
                several.getvalue(),
                one.getvalue(),
                whole.getvalue()[:-5],
                whole.getvalue()[:20],
                whole.getvalue().replace(b"(7, 5),", b"(9999999999999999999, 5),"),
                b"\x93NUMPY\x01\x00\xff\xff{",
            )
        ):
            with self.subTest(data=data[:20]):
                path = self.write(f"{i}.npy", data)
                self.refused(ValueError, f"{i}.npy: ", kvant.read_vectors, path)

    @unittest.skipIf(h5py is None, "needs h5py")
    def test_hdf5(self):
        with h5py.File(self.folder / "a.hdf5", "w") as file:
            file["train"], file["test"] = self.rows, self.rows[:2].astype(np.float64)
        self.same(self.folder / "a.hdf5", self.rows)
        self.same(self.folder / "a.hdf5", self.rows[1:2], dataset="test", first=1)
        self.refused(
            ValueError, "'queries'|train", kvant.read_vectors, self.folder / "a.hdf5", "queries"
        )


if __name__ == "__main__":
    unittest.main()
