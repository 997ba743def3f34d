"""Each allocation of libkvant fails once in the life of a kvant.Cache. A call raises kvant.Error,
and the same call again succeeds. No row that an earlier call stored is lost, and the final bits are
the same. The preloaded library of refused.c lets allocations fail.
"""

import ctypes
import unittest

from common import TestCase, normal, np

import kvant

LAYERS, HEADS, KV_HEADS, DIM, STEP = 2, 4, 2, 64, 40
MEMORY = 40  # KVANT_ERR_MEMORY
library = ctypes.CDLL(None)
library.refused.restype = ctypes.c_long


class Life:
    def __init__(self, failing):
        self.failing, self.refusals = failing, 0

    def call(self, function, *args):
        """Calls a function once more if the allocation that fails is one of this call's."""
        library.refuse_at(ctypes.c_long(self.failing))
        try:
            return function(*args)
        except kvant.Error as error:
            assert error.status == MEMORY, error
        finally:
            self.refusals += library.refused()
            library.refuse_at(ctypes.c_long(0))
        return function(*args)

    def run(self):
        shape = dict(n_layers=LAYERS, n_heads=HEADS, n_kv_heads=KV_HEADS, head_dim=DIM)
        cache = self.call(lambda: kvant.Cache(**shape, max_tokens=512, max_sequences=2))
        first = self.call(cache.new_sequence)
        for step in range(4):
            for layer in range(LAYERS):
                k, v = (normal(10 * step + layer + i, STEP, KV_HEADS, DIM) for i in (0, 5))
                before = cache.length(first, layer)
                self.call(cache.append, layer, first, k, v)
                assert cache.length(first, layer) == before + STEP
        second = self.call(cache.fork, first)
        q = normal(99, 2, HEADS, DIM)
        return [self.call(cache.attend, layer, s, q) for layer in (0, 1) for s in (first, second)]


class NoMemory(TestCase):
    def test_each_allocation_may_fail(self):
        wanted = Life(0).run()
        failing = 0
        while True:
            life = Life(failing + 1)
            for one, other in zip(life.run(), wanted):
                self.assertTrue(np.array_equal(one, other), failing)
            if life.refusals == 0:
                break
            failing += 1
        self.assertGreater(failing, 2)


if __name__ == "__main__":
    unittest.main()
