"""The serde of kvant.lmcache by itself: the calls that LMCache would make, on a mock of LMCache,
and the GPU half on the mock of a GPU. The tests in tests/python/lmcache use the real LMCache.
"""

import contextlib
import logging
import pathlib
import sys
import tempfile
import types
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from common import TestCase, np  # noqa: E402

import kvant  # noqa: E402
from kvant import structs  # noqa: E402
from kvant.library import library  # noqa: E402
from kvant.lmcache import options, register, state  # noqa: E402
from kvant.lmcache.container import HEADER, Damaged  # noqa: E402
from kvant.lmcache.gpu import GpuPages  # noqa: E402
from kvant.lmcache.layout import FUSED, RAW, SPLIT, layout  # noqa: E402
from kvant.lmcache.serde import Serde  # noqa: E402

LAYERS, TOKENS, HEADS, DIM = 3, 128, 2, 64
SHAPES = {FUSED: (1, LAYERS, TOKENS, HEADS * 2 * DIM), SPLIT: (2, LAYERS, TOKENS, HEADS * DIM)}
BF16_ROUNDING = 2.0**-8  # relative to a number


def key_of(**changes):
    made = dict(
        model_name="org/model",
        kv_rank=1 << 24 | 1 << 8,
        object_group_id=0,
        cache_salt="",
        chunk_hash=bytes(range(32)),
    )
    return types.SimpleNamespace(**made | changes)


KEY = key_of()


def tensor(shape, seed=1, dtype=torch.bfloat16, shift=2.0):
    """Rows with a constant part, as keys have it."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(shape, generator=generator)
        + shift * torch.randn(shape[-1], generator=generator)
    ).to(dtype)


def roles(x):
    """Keys and values as [layers, tokens, heads, dim], from either layout."""
    if x.shape[0] == 2:
        return [part.view(*part.shape[:2], -1, DIM) for part in x]
    return list(x[0].view(*x.shape[1:3], -1, 2, DIM).unbind(3))


def serde(**words):
    return Serde(options.read({"head_dim": DIM, "workers": 2} | words))


def memory(n, shift=0):
    """n bytes that begin `shift` bytes after a multiple of 64, filled with old bytes."""
    data = np.full(n + 128, 0xA5, np.uint8)
    return data[-data.ctypes.data % 64 + shift :][:n]


def stored(it, tensors, key=KEY, shift=0):
    data = memory(it.size([x.shape for x in tensors], [x.dtype for x in tensors]), shift)
    assert it.encode(tensors, data, key) == data.size
    return data


def loaded(it, data, like, key=KEY):
    out = [torch.full_like(x, 7) for x in like]
    it.decode(data, out, key)
    return out


@contextlib.contextmanager
def calibrated():
    """The path of a calibration with twice as many kv heads."""
    calibrator, rng = kvant.Calibrator(model="m"), np.random.default_rng(3)
    for layer in range(LAYERS):
        for role in "kv":
            calibrator.add_rows(
                layer, role, rng.standard_normal((512, 2 * HEADS, DIM), dtype=np.float32) + 1
            )
        for head in range(2 * HEADS):
            calibrator.add_queries(layer, head, rng.standard_normal((256, DIM), dtype=np.float32))
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/m.kvcal"
        calibrator.finish().save(path)
        yield path


class RoundTrip(TestCase):
    def test_rows_are_those_of_the_codecs(self):
        """The bytes by an independent path: kvant.Codec per layer and head, and the chunk's center
        by its definition.
        """
        for kind, (k, v) in (
            (FUSED, ("turboquant-4:center=first", "int-4")),
            (SPLIT, ("int-8:center=first,norm=first", "trellis-3")),
        ):
            x, it = tensor(SHAPES[kind]), serde(k=k, v=v)
            self.assertEqual(layout(x.shape, x.dtype, DIM).kind, kind)
            [out] = loaded(it, stored(it, [x]), [x])
            for spec, role, rows, found in zip((k, v), "kv", roles(x), roles(out)):
                codec = kvant.Codec(spec, DIM, role)
                for layer in range(LAYERS):
                    sampled = rows[layer, state.sample(TOKENS)].float().numpy()
                    own = iter(
                        state.of(np, sampled, codec.center == "first", codec.norm == "first")
                    )
                    center = next(own) if codec.center == "first" else [None] * HEADS
                    scale = next(own) if codec.norm == "first" else [None] * HEADS
                    for head in range(HEADS):
                        r = rows[layer, :, head].float().numpy()
                        want = codec.decode(
                            codec.encode(r, center[head], scale[head]),
                            TOKENS,
                            center[head],
                            scale[head],
                        )
                        self.assertTrue(
                            torch.equal(
                                found[layer, :, head], torch.from_numpy(want).to(torch.bfloat16)
                            )
                        )

    def test_sizes(self):
        """Rows are exact, and 3.8 times smaller than bfloat16 in the shape of Llama 3.1 8B."""
        for words in (dict(), dict(k="turboquant-4", v="turboquant-4"), dict(preset="balanced")):
            it = Serde(options.read({"head_dim": 128} | words))
            for shape in ((1, 32, 256, 8 * 2 * 128), (2, 32, 256, 8 * 128)):
                self.assertGreater(2 * np.prod(shape) / it.size([shape], [torch.bfloat16]), 3.8)
            it.close()

    def test_any_number_of_tokens_and_dtype(self):
        for n, dtype in (
            (1, torch.bfloat16),
            (63, torch.float16),
            (65, torch.float32),
            (200, torch.bfloat16),
        ):
            x = tensor((1, 2, n, HEADS * 2 * DIM), dtype=dtype)
            it = serde(k="int-8:center=first", v="int-8")
            [out] = loaded(it, stored(it, [x], shift=1), [x])
            for rows, found in zip(roles(x), roles(out)):
                step = (
                    rows.float().amax(-1) - rows.float().amin(-1)
                ) / 255  # error of int-8 without the center, which is at least as large
                bound = step[..., None] + rows.float().abs() * BF16_ROUNDING + 0.02
                self.assertTrue(bool(((rows - found).float().abs() <= bound).all()))

    def test_bytes_depend_on_nothing_but_the_rows(self):
        x = tensor(SHAPES[FUSED])
        first, second = (
            stored(serde(workers=n), [x], shift=shift) for n, shift in ((1, 0), (4, 17))
        )
        self.assertTrue(np.array_equal(first, second))

    def test_other_tensors_are_kept_as_they_are(self):
        """Recurrent states, fp8, and a head_dim that does not divide are kept as they are, with a
        line in the log.
        """
        for x in (
            torch.arange(777, dtype=torch.int32),
            torch.zeros(2, 3, 5, dtype=torch.float8_e4m3fn),
            tensor((1, 2, 64, 200)),
        ):
            it = serde()
            with self.assertLogs("lmcache.kvant", logging.WARNING) as log:
                data = stored(it, [x])
            self.assertIn("uncompressed", log.output[0])
            self.assertEqual(it._stored([x.shape], [x.dtype])[0].layout.kind, RAW)
            self.assertEqual(data.size, HEADER + -(-x.nbytes // 8) * 8)
            [out] = [torch.zeros_like(x)]
            it.decode(data, [out], KEY)
            self.assertTrue(torch.equal(out.view(torch.uint8), x.view(torch.uint8)))

    def test_several_tensors_in_one_object(self):
        x = [tensor(SHAPES[FUSED]), tensor(SHAPES[SPLIT], 2)]
        it = serde()
        data = stored(it, x)
        alone = [stored(it, [one]) for one in x]
        self.assertEqual(data.size, sum(one.size for one in alone))
        for one, out, own in zip(x, loaded(it, data, x), alone):
            self.assertTrue(torch.equal(out, loaded(it, own, [one])[0]))

    def test_refused_rows_are_not_stored(self):
        for bad, words in ((float("nan"), "NaN"), (float("inf"), "infinity")):
            x = tensor(SHAPES[FUSED])
            x[0, 1, 70, 5] = bad
            self.refused(kvant.Error, words, stored, serde(k="turboquant-4"), [x])

    def test_shares_of_a_calibrated_model(self):
        """Tensor parallelism: rank 1 of 2 has the second half of the kv heads. Layers that the file
        lacks are kept as they are.
        """
        with calibrated() as path:
            it = serde(preset="balanced", calibration=path)
            calibration = kvant.Calibration(path)
            x = tensor(SHAPES[FUSED])
            for rank in (0, 1):
                key = key_of(kv_rank=2 << 24 | rank << 16)
                out = roles(loaded(it, stored(it, [x], key), [x], key)[0])[0]
                for layer, head in ((0, 0), (2, 1)):
                    of_model = HEADS * rank + head
                    codec = kvant.Codec(
                        "trellis-4:transform=file", DIM, "k", calibration, layer, of_model
                    )
                    center = calibration.entry(layer, of_model).mean
                    pages = codec.encode(roles(x)[0][layer, :, head].float().numpy(), center)
                    want = torch.from_numpy(codec.decode(pages, TOKENS, center)).to(torch.bfloat16)
                    self.assertTrue(torch.equal(out[layer, :, head], want))
            with self.assertLogs("lmcache.kvant", logging.WARNING):
                it.size([(1, LAYERS + 1, 64, HEADS * 2 * DIM)], [torch.bfloat16])


class Damage(TestCase):
    """An object that is not the expected one causes an error, and nothing is written."""

    def setUp(self):
        self.small = tensor((1, 1, 64, 2 * 32), dtype=torch.bfloat16)
        self.it = Serde(options.read({"head_dim": 32, "workers": 1}))
        self.data = stored(self.it, [self.small])
        self.out = torch.full_like(self.small, 7)

    def missed(self, data, it=None, key=KEY, words=""):
        error = self.refused(Damaged, words, (it or self.it).decode, data, [self.out], key)
        self.assertTrue(bool((self.out == 7).all()))
        return str(error)

    def test_every_byte(self):
        for i in range(self.data.size):
            for mask in (0x01, 0x80, 0xFF):
                self.data[i] ^= mask
                self.missed(self.data)
                self.data[i] ^= mask
        self.it.decode(self.data, [self.out], KEY)  # the complete object can be used
        self.assertFalse(bool((self.out == 7).any()))

    def test_every_length(self):
        """Cut objects, and cut objects followed by zeros or old bytes, as in buffers of a fixed
        size.
        """
        for n in range(self.data.size):
            self.missed(self.data[:n])
            zeros, old = np.zeros_like(self.data), np.full_like(self.data, 0xA5)
            zeros[:n], old[:n] = self.data[:n], self.data[:n]
            if not np.array_equal(zeros, self.data):  # its last bytes may be zeros
                self.missed(zeros)
            self.missed(old)

    def test_patterns(self):
        """Two flips that cancel in a sum, runs of zeros, moved words and pages, noise."""
        words = self.data.view(np.uint64)
        body, n = HEADER // 8, len(words)
        rng = np.random.default_rng(5)
        for bit in (0, 31, 32, 63):
            for step in (1, 2, 8, 64):
                other = words.copy()
                other[body : body + 2 * step : step] ^= np.uint64(1) << np.uint64(bit)
                self.missed(other.view(np.uint8))
        for _ in range(200):
            a, b = sorted(rng.choice(np.arange(body, n), 2, replace=False))
            swapped, zeros, noise = words.copy(), words.copy(), words.copy()
            swapped[[a, b]] = swapped[[b, a]]
            zeros[a:b] = 0
            noise[a:b] = rng.integers(0, 2**64, b - a, dtype=np.uint64)
            for other in (swapped, zeros, noise):
                if not np.array_equal(other, words):
                    self.missed(other.view(np.uint8))

    def test_of_something_else(self):
        for change in (
            dict(model_name="org/other"),
            dict(kv_rank=2 << 24),
            dict(chunk_hash=bytes(32)),
            dict(cache_salt="x"),
            dict(object_group_id=1),
        ):
            self.missed(
                self.data, key=key_of(**change), words="other model, rank or chunk than expected"
            )
        for options_, words in (
            (dict(model="revision 2"), "model"),
            (dict(v="turboquant-4:scale=norm"), "codecs"),
            (dict(k="turboquant-4:center=first,seed=9"), "codecs"),
        ):
            self.missed(
                self.data,
                Serde(options.read({"head_dim": 32, "workers": 1} | options_)),
                words=words,
            )
        other = self.data.copy()
        other[7] -= 1  # KVNTLMC1
        self.missed(other, words="not an object of this version")
        self.missed(np.zeros_like(self.data), words="not an object")
        for shape in ((1, 1, 64, 4 * 32), (1, 2, 64, 2 * 32), (1, 1, 63, 2 * 32), (2, 1, 64, 32)):
            self.out = torch.full(shape, 7, dtype=torch.bfloat16)
            self.missed(self.data)

    def test_bodies_are_records(self):
        """The C API imports each record of a body. Its tensor then reads the rows that the serde
        returns. A record in another one's place is refused.
        """
        x = tensor((1, LAYERS, 100, HEADS * 2 * DIM), dtype=torch.float32)
        for words in Gpu.CODECS:
            it = serde(**words)
            data, [held] = stored(it, [x]), it._stored([x.shape], [x.dtype])
            [out] = loaded(it, data, [x])
            body = data[HEADER:]
            for layer in range(LAYERS):
                for role, rows in enumerate(roles(out)):
                    codecs = held.codecs[layer][role]
                    found = kvant.Tensor(codecs, n_blocks=2)
                    record = held.records.place(body, layer, role)
                    slots = (structs.BlockSlots * 2)(
                        structs.BlockSlots(2**64 - 1, 0), structs.BlockSlots(2**36 - 1, 1)
                    )
                    status = library().kvant_tensor_import_record(
                        found.handle, slots, 2, record.ctypes.data, record.size, 1
                    )
                    self.assertEqual(status, 0, library().kvant_error_message())
                    self.assertTrue(
                        np.array_equal(found.read(0, 100), rows[layer].contiguous().numpy())
                    )
            other = data.copy()
            sizes = held.records
            sizes.place(other[HEADER:], 0, 0)[:] = sizes.place(body, 1, 0)
            self.refused(Damaged, "checksum", loaded, it, other, [x])


class Gpu(TestCase):
    """The GPU's half, in float32, which hides no difference."""

    CODECS = (
        dict(k="turboquant-4", v="int-4"),
        dict(),
        dict(k="trellis-3:center=first,norm=first", v="turboquant-6:center=first"),
    )

    def test_a_partial_block_holds_its_own_rows_alone(self):
        """The same threads encoded another chunk before, and refused a chunk with a NaN. The bytes
        equal the bytes of a new serde.
        """
        for words in self.CODECS:
            for pages in (None, GpuPages("cpu")):
                it, new = serde(**words), serde(**words)
                it._gpu = new._gpu = pages
                for n in (1, 37, 65, 127):
                    before = tensor(SHAPES[FUSED], dtype=torch.float32)
                    x = tensor((1, LAYERS, n, HEADS * 2 * DIM), seed=2, dtype=torch.float32)
                    stored(it, [before])
                    before[0, 1, 101, 7] = float("nan")  # a row that gives no center
                    self.refused(kvant.Error, "NaN", stored, it, [before])
                    self.assertTrue(np.array_equal(stored(it, [x]), stored(new, [x])))
                    self.assertTrue(
                        torch.equal(
                            *loaded(it, stored(it, [x]), [x]), *loaded(new, stored(new, [x]), [x])
                        )
                    )

    def test_the_same_objects(self):
        for words in self.CODECS:
            for shape in (*SHAPES.values(), (1, 2, 70, HEADS * 2 * DIM)):
                cpu, gpu = serde(**words), serde(**words)
                gpu._gpu = GpuPages("cpu")
                x = tensor(shape, dtype=torch.float32)
                self.assertTrue(gpu._gpu.takes(gpu._stored([x.shape], [x.dtype])[0]))
                data = stored(cpu, [x])
                self.assertTrue(np.array_equal(data, stored(gpu, [x], shift=3)))
                self.assertTrue(torch.equal(*loaded(cpu, data, [x]), *loaded(gpu, data, [x])))
                data[-1000] ^= 1
                self.refused(Damaged, "checksum", loaded, gpu, data, [x])

    def test_a_calibration_s_numbers(self):
        """Numbers for each layer and head: centers, scales, matrices, feedback. Sums of matrices
        may be rounded in another order.
        """
        with calibrated() as path:
            for k, v in (
                ("turboquant-4:transform=file,feedback", "int-4:center=file"),
                ("int-8:transform=diagonal", "int-8:norm=file"),
            ):
                cpu, gpu = (serde(k=k, v=v, calibration=path) for _ in range(2))
                gpu._gpu = GpuPages("cpu")
                x = tensor(SHAPES[FUSED], dtype=torch.float32)
                key = key_of(kv_rank=2 << 24 | 1 << 16)
                self.assertTrue(gpu._gpu.takes(gpu._stored([x.shape], [x.dtype], key.kv_rank)[0]))
                data, other = stored(cpu, [x], key), stored(gpu, [x], key)
                self.assertGreater((data == other).mean(), 0.99)
                [a], [b] = loaded(cpu, other, [x], key), loaded(gpu, other, [x], key)
                self.assertLess(float((a - b).abs().max()), 1e-4)

    def test_refused_rows(self):
        it = serde(k="turboquant-4")
        it._gpu = GpuPages("cpu")
        x = tensor(SHAPES[FUSED], dtype=torch.float32)
        x[0, 2, 3, 4] = float("nan")
        self.refused(kvant.Error, "NaN", stored, it, [x])


@unittest.skipUnless(torch.cuda.is_available(), "no GPU")
class Real(TestCase):
    """A GPU of this machine gives the CPU's bytes, except for a chunk's own centers. The CPU reads
    the GPU's objects, and the GPU reads the CPU's.
    """

    def test_each_reads_the_other_s(self):
        for words in (*Gpu.CODECS[:2], dict(k="int-4", v="turboquant-4")):
            for kind, n in ((FUSED, TOKENS), (SPLIT, 200)):
                cpu, gpu = serde(**words), serde(**words, device="cuda")
                shape = list(SHAPES[kind])
                shape[2] = n
                x = tensor(shape)
                self.assertTrue(gpu._gpu.takes(gpu._stored([x.shape], [x.dtype])[0]))
                data = [stored(it, [x]) for it in (cpu, gpu)]
                if "k" in words:
                    self.assertTrue(np.array_equal(*data))
                for one in data:
                    [a], [b] = loaded(cpu, one, [x]), loaded(gpu, one, [x])
                    near = (
                        a.float().abs() * BF16_ROUNDING + 2e-5
                    )  # sums of a rotation in another order, then bfloat16
                    self.assertTrue(bool(((a - b).float().abs() <= near).all()))
                data[1][-700] ^= 8
                self.refused(Damaged, "checksum", loaded, gpu, data[1], [x])


class Processor:
    """A mock of LMCache's AsyncSerdeProcessor that runs in place."""

    def __init__(self, serializer, deserializer, max_workers=1):
        self.serializer, self.deserializer = serializer, deserializer

    def close(self):
        pass


@contextlib.contextmanager
def mock_device():
    """A mock of the names that kvant.lmcache imports from LMCache."""
    factories = {}
    module = types.ModuleType("lmcache.v1.distributed.serde")
    module.Serializer = module.Deserializer = type("Base", (), {})
    module.AsyncSerdeProcessor = Processor
    module.register_serde_factory = factories.__setitem__
    module.get_registered_serde_types = lambda: list(factories)
    names = ["lmcache", "lmcache.v1", "lmcache.v1.distributed"]
    made = {name: types.ModuleType(name) for name in names} | {module.__name__: module}
    with mock.patch.dict(sys.modules, made):
        sys.modules.pop("kvant.lmcache.processor", None)
        yield factories
        sys.modules.pop("kvant.lmcache.processor", None)


class Memory:
    def __init__(self, *tensors):
        self.tensor, self._tensors = tensors[0], tensors

    def get_shapes(self):
        return [x.shape for x in self._tensors]

    def get_tensor(self, i):
        return self._tensors[i]


class Interface(TestCase):
    def test_what_lmcache_calls(self):
        with mock_device() as factories:
            register()
            register()
            self.assertEqual(list(factories), ["kvant"])
            made = factories["kvant"]({"head_dim": DIM, "k": "int-8", "v": "int-8"})
            for tensors in (
                [tensor(SHAPES[FUSED])],
                [tensor(SHAPES[FUSED]), tensor(SHAPES[SPLIT])],
            ):
                desc = types.SimpleNamespace(
                    shapes=[x.shape for x in tensors], dtypes=[x.dtype for x in tensors]
                )
                size = made.serializer.estimate_serialized_size(desc)
                data = torch.zeros(size, dtype=torch.uint8)
                self.assertEqual(
                    made.serializer.serialize(Memory(*tensors), Memory(data), KEY), size
                )
                out = [torch.zeros_like(x) for x in tensors]
                made.deserializer.deserialize(Memory(data), Memory(*out), KEY)
                for a, b in zip(tensors, out):
                    self.assertLess(float((a - b).float().norm() / a.float().norm()), 0.02)
                data[300] ^= 4
                words = f"{KEY.model_name}|{KEY.chunk_hash.hex()}|a miss|checksum"
                self.refused(
                    ValueError,
                    words,
                    made.deserializer.deserialize,
                    Memory(data),
                    Memory(*out),
                    KEY,
                )
            made.close()

    def test_options(self):
        self.refused(ValueError, "head_dim is needed", options.read, {})
        self.refused(
            ValueError,
            "keys is none of|head_dim, preset, k, v",
            options.read,
            {"head_dim": 64, "keys": "int-4"},
        )
        self.refused(
            ValueError, "not both", options.read, {"head_dim": 64, "preset": "small", "k": "int-4"}
        )
        self.refused(TypeError, "head_dim", options.read, {"head_dim": "64"})
        self.refused(ValueError, "workers", options.read, {"head_dim": 64, "workers": -1})
        self.refused(kvant.Error, "nothing", serde, k="nothing-4")
        self.refused(kvant.Error, "calibration", serde, k="trellis-4:transform=file")
        self.refused(
            kvant.Error, "missing.kvcal", serde, preset="small", calibration="missing.kvcal"
        )

    def test_without_lmcache(self):
        with mock.patch.dict(sys.modules, {"lmcache.cli.main": None}):
            from kvant.lmcache.__main__ import main

            self.refused(SystemExit, "pip install lmcache", main)


if __name__ == "__main__":
    unittest.main()
