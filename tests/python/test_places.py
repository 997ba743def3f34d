"""Arrays on a GPU by their address: the fields of DLPack and __cuda_array_interface__ that kvant
reads, and the arrays that it refuses. No GPU is needed, because the arrays only claim to be on a
GPU.
"""

import unittest

from common import TestCase, normal, np

import kvant
from kvant import library, places


class OnGpu:
    """An array that claims to be on a GPU, by DLPack or by the interface of CUDA's arrays."""

    def __init__(self, array, dlpack=True, kind=2, stream=None):
        self.array, self.kind, self.streams = array, kind, []
        if dlpack:
            self.__dlpack__ = self._dlpack
            self.__dlpack_device__ = lambda: (kind, 0)
        else:
            self.__cuda_array_interface__ = array.__array_interface__ | {
                "version": 3,
                "stream": stream,
            }

    def _dlpack(self, stream):
        """As from a producer whose data pointer is the beginning of a larger allocation."""
        self.streams.append(stream)
        capsule = self.array.__dlpack__()
        tensor = places.dl_tensor(capsule)
        tensor.data, tensor.byte_offset = tensor.data - 32, 32
        return capsule


class Gpu(TestCase):
    def take(self, value, dtype="float32", shape=(None, 3, 8), rows=True):
        return places.Gpu().take(value, "q", dtype, shape, rows)

    def test_what_the_protocols_say(self):
        whole = normal(1, 5, 4, 3, 8)
        for array in (whole[0], whole[:, 1], whole[1:3, 2], whole[2].astype(np.float16)):
            for dlpack in (True, False):
                view = self.take(OnGpu(array, dlpack), array.dtype.name)
                self.assertEqual((view.address, view.shape), (array.ctypes.data, array.shape))
                self.assertEqual(
                    view.strides, tuple(stride // array.itemsize for stride in array.strides)
                )

    def test_the_producer_orders_its_work_before_ours(self):
        array = OnGpu(normal(1, 2, 3, 8))
        self.take(array)
        self.assertEqual(array.streams, [1])
        self.take(OnGpu(normal(1, 2, 3, 8), dlpack=False, stream=1))
        self.refused(
            ValueError, "q: |stream 7", self.take, OnGpu(normal(1, 2, 3, 8), dlpack=False, stream=7)
        )

    def test_another_stream(self):
        array = OnGpu(normal(1, 2, 3, 8))
        places.Gpu(4096).take(array, "q", "float32", (2, 3, 8))
        self.assertEqual(array.streams, [4096])
        legacy = OnGpu(normal(1, 2, 3, 8), dlpack=False, stream=1)
        self.refused(
            ValueError,
            "q: |stream 1|4096",
            places.Gpu(4096).take,
            legacy,
            "q",
            "float32",
            (2, 3, 8),
        )

    def test_views_keep_their_memory(self):
        """A capsule that nobody consumed still owns its part of the array."""
        array = normal(1, 2, 3, 8)
        copy = array.copy()
        view = self.take(OnGpu(array))
        del array
        again = np.frombuffer(
            (places.c.c_char * copy.nbytes).from_address(view.address), np.float32
        )
        self.assertTrue(np.array_equal(again.reshape(copy.shape), copy))

    def test_refusals(self):
        good = normal(1, 2, 3, 8)
        for error, words, value in (
            (ValueError, "q: |GPU", good),
            (ValueError, "q: |GPU", OnGpu(good, kind=1)),
            (TypeError, "q: |list", [1.0]),
            (TypeError, "q: |float64", OnGpu(good.astype(np.float64))),
            (TypeError, "q: |int32", OnGpu(good.astype(np.int32), dlpack=False)),
            (ValueError, "q: |[n, 3, 8]|[2, 3, 7]", OnGpu(good[:, :, :7])),
            (ValueError, "q: |contiguous", OnGpu(normal(1, 2, 3, 16)[:, :, ::2])),
        ):
            self.refused(error, words, self.take, value)
        self.refused(
            ValueError, "q: |contiguous", self.take, OnGpu(normal(1, 2, 5, 8)[:, :3]), rows=False
        )

    def test_outputs(self):
        gpu, good = places.Gpu(), normal(1, 2, 3, 8)
        self.assertEqual(
            gpu.give(OnGpu(good), "out", "float32", (2, 3, 8)).address, good.ctypes.data
        )
        self.refused(
            ValueError,
            "out: |contiguous",
            gpu.give,
            OnGpu(good.swapaxes(0, 1)),
            "out",
            "float32",
            (3, 2, 8),
        )
        self.refused(TypeError, "out: |OnGpu", gpu.new, OnGpu(good), (2, 3, 8))


class HostForGpu:
    """A libkvant whose caches on "cuda" are on the host: the memory that they read and write is
    there.
    """

    def __getattr__(self, name):
        return getattr(HostForGpu.real, name)

    def kvant_cache_create(self, params, cache):
        self.device, self.stream = params.device, params.stream
        params.device, params.stream = b"cpu", None
        return self.real.kvant_cache_create(params, cache)


class CacheOnGpu(TestCase):
    """A cache whose arguments are addresses in device memory, as far as Python can tell."""

    def setUp(self):
        HostForGpu.real = library.library()
        self.addCleanup(setattr, library, "_library", HostForGpu.real)
        library._library = self.library = HostForGpu()
        self.cache = kvant.Cache(2, 4, 2, 64, 128, device="cuda", k="int-4")
        self.sequence = self.cache.new_sequence()

    def test_it_computes_as_on_the_host(self):
        self.assertEqual((self.library.device, self.library.stream), (b"cuda", None))
        kvant.Cache(2, 4, 2, 64, 128, device="cuda:0", k="int-4", stream=4096)
        self.assertEqual((self.library.device, self.library.stream), (b"cuda:0", 4096))
        k, v, wide = normal(1, 70, 2, 64), normal(2, 70, 2, 64), normal(3, 2, 3, 4, 64)
        host = kvant.Cache(2, 4, 2, 64, 128, k="int-4")
        host.append(1, host.new_sequence(), k, v)
        lse, mask = np.empty((2, 4), np.float32), np.zeros((2, 70), np.float16)
        mask[:, 5:9] = -np.inf
        wanted = host.attend(1, 0, wide[:, 1], mask=mask, lse=lse)
        for dlpack in (True, False):
            cache = kvant.Cache(2, 4, 2, 64, 128, device="cuda", k="int-4")
            sequence = cache.new_sequence()
            cache.append(1, sequence, OnGpu(k, dlpack), OnGpu(v, dlpack))
            out, got = np.empty((2, 4, 64), np.float32), np.empty_like(lse)
            given = OnGpu(out, dlpack)
            options = {"mask": OnGpu(mask, dlpack), "lse": OnGpu(got, dlpack), "out": given}
            self.assertIs(cache.attend(1, sequence, OnGpu(wide[:, 1], dlpack), **options), given)
            self.assertTrue(np.array_equal(out, wanted) and np.array_equal(got, lse))

    def test_an_output_is_made_where_the_queries_can(self):
        class Torch(OnGpu):
            def new_empty(self, shape):
                return Torch(np.empty(shape, np.float32))

        rows = OnGpu(normal(1, 3, 2, 64))
        self.cache.append(0, self.sequence, rows, rows)
        out = self.cache.attend(0, self.sequence, Torch(normal(2, 1, 4, 64)))
        self.assertTrue(np.isfinite(out.array).all())
        self.refused(
            TypeError, "out: ", self.cache.attend, 0, self.sequence, OnGpu(normal(2, 1, 4, 64))
        )

    def test_refusals(self):
        rows = normal(1, 3, 2, 64)
        self.refused(ValueError, "k: |GPU", self.cache.append, 0, self.sequence, rows, rows)
        self.refused(
            ValueError,
            "v: |[3, 2, 64]",
            self.cache.append,
            0,
            self.sequence,
            OnGpu(rows),
            OnGpu(rows[:2]),
        )
        self.refused(
            ValueError,
            "k: |contiguous",
            self.cache.append,
            0,
            self.sequence,
            OnGpu(rows[::2]),
            OnGpu(rows[:2]),
        )
        self.assertEqual(self.cache.length(self.sequence), 0)


class Host(TestCase):
    def test_no_copies_of_contiguous_arrays(self):
        host, array = places.Host(), normal(1, 4, 3, 8)
        self.assertEqual(host.take(array, "k", "float32", (None, 3, 8)).address, array.ctypes.data)
        view = host.take(array[1:, 1:], "q", "float32", (None, 2, 8), rows=True)
        self.assertEqual((view.address, view.strides), (array[1:, 1:].ctypes.data, (24, 8, 1)))
        for bad in (array[:, 1:], array[::-1]):
            copy = host.take(bad, "k", "float32", (None, None, 8))
            self.assertFalse(np.shares_memory(copy.keep, array))
            self.assertTrue(np.array_equal(copy.keep, bad))
        self.assertFalse(
            np.shares_memory(
                host.take(array[..., ::-1], "q", "float32", (4, 3, 8), rows=True).keep, array
            )
        )


if __name__ == "__main__":
    unittest.main()
