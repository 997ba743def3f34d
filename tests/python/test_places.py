"""Arrays on a GPU by their address: what DLPack and __cuda_array_interface__ say, and what is refused. No GPU is needed:
the arrays only tell where they would lie."""

import unittest

from common import TestCase, normal, np

from kvant import places


class OnGpu:
    """An array that says it lies on a GPU, by DLPack or by the interface of CUDA's arrays."""

    def __init__(self, array, dlpack=True, kind=2, stream=None):
        self.array, self.kind, self.streams = array, kind, []
        if dlpack:
            self.__dlpack__ = self._dlpack
            self.__dlpack_device__ = lambda: (kind, 0)
        else:
            self.__cuda_array_interface__ = array.__array_interface__ | {"version": 3, "stream": stream}

    def _dlpack(self, stream):
        self.streams.append(stream)
        return self.array.__dlpack__()


class Gpu(TestCase):
    def take(self, value, dtype="float32", shape=(None, 3, 8), rows=True):
        return places.Gpu().take(value, "q", dtype, shape, rows)

    def test_what_the_protocols_say(self):
        whole = normal(1, 5, 4, 3, 8)
        for array in (whole[0], whole[:, 1], whole[1:3, 2], whole[2].astype(np.float16)):
            for dlpack in (True, False):
                view = self.take(OnGpu(array, dlpack), array.dtype.name)
                self.assertEqual((view.address, view.shape), (array.ctypes.data, array.shape))
                self.assertEqual(view.strides, tuple(stride // array.itemsize for stride in array.strides))

    def test_the_producer_orders_its_work_before_ours(self):
        array = OnGpu(normal(1, 2, 3, 8))
        self.take(array)
        self.assertEqual(array.streams, [1])
        self.take(OnGpu(normal(1, 2, 3, 8), dlpack=False, stream=1))
        self.refused(ValueError, "q: |stream 7", self.take, OnGpu(normal(1, 2, 3, 8), dlpack=False, stream=7))

    def test_views_keep_their_memory(self):
        """A capsule that nobody consumed still owns its part of the array."""
        array = normal(1, 2, 3, 8)
        copy = array.copy()
        view = self.take(OnGpu(array))
        del array
        again = np.frombuffer((places.c.c_char * copy.nbytes).from_address(view.address), np.float32)
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
        self.refused(ValueError, "q: |contiguous", self.take, OnGpu(normal(1, 2, 5, 8)[:, :3]), rows=False)

    def test_outputs(self):
        gpu, good = places.Gpu(), normal(1, 2, 3, 8)
        self.assertEqual(gpu.give(OnGpu(good), "out", "float32", (2, 3, 8)).address, good.ctypes.data)
        self.refused(ValueError, "out: |contiguous", gpu.give, OnGpu(good.swapaxes(0, 1)), "out", "float32", (3, 2, 8))
        self.refused(TypeError, "out: |OnGpu", gpu.new, OnGpu(good), (2, 3, 8))


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
        self.assertFalse(np.shares_memory(host.take(array[..., ::-1], "q", "float32", (4, 3, 8), rows=True).keep, array))


if __name__ == "__main__":
    unittest.main()
