"""Captures read as they were written, and are refused if anything in them does not fit. The error
of a layer equals a plain computation in binary64.
"""

import json
import pathlib
import tempfile
import unittest

import kvant
import numpy as np
from kvant.tuning import captures, layer_error
from kvant.tuning.safetensors import Damaged

KV_HEADS, HEADS, DIM_K, DIM_V, CTX, TOKENS, STEP, WINDOW = 2, 4, 16, 32, 192, 320, 16, 100
QUERIES = CTX // STEP + (TOKENS - CTX) // STEP
LAYER = 1
METADATA = {
    "format": "kvant-capture-1",
    "tokens": "320",
    "ctx": "192",
    "query_step": "16",
    "layers.1.attention": "0.25 0 0",
}


def numbers():
    rng = np.random.default_rng(3)
    shapes = {
        "k": (KV_HEADS, TOKENS, DIM_K),
        "v": (KV_HEADS, TOKENS, DIM_V),
        "q": (HEADS, QUERIES, DIM_K),
    }
    tensors = {
        f"layers.{LAYER}.{kind}": rng.uniform(-2, 2, shape).astype("<f2")
        for kind, shape in shapes.items()
    }
    return {"windows": np.array([0, WINDOW], "<i4"), **tensors}


def write(path, tensors, metadata=METADATA):
    header, at = {"__metadata__": metadata}, 0
    for name, values in tensors.items():
        kind = {"f2": "F16", "f4": "F32", "i4": "I32"}[values.dtype.str[1:]]
        header[name] = {
            "dtype": kind,
            "shape": values.shape,
            "data_offsets": [at, at + values.nbytes],
        }
        at += values.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(
        len(text).to_bytes(8, "little")
        + text
        + b"".join(values.tobytes() for values in tensors.values())
    )


class InAFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "capture"


class Reading(InAFolder):
    def test_rows_are_those_written(self):
        tensors = numbers()
        write(self.path, tensors)
        with captures.Capture(self.path) as capture:
            self.assertEqual((capture.n_layers, list(capture.layers)), (2, [LAYER]))
            self.assertEqual(
                capture.layers[LAYER],
                captures.Shape(KV_HEADS, HEADS, (DIM_K, DIM_V), 0.25, 0, 0, WINDOW),
            )
            for kind in "kvq":
                rows = capture.rows(LAYER, kind)
                self.assertEqual(rows.dtype, np.float32)
                np.testing.assert_array_equal(rows, tensors[f"layers.1.{kind}"])
            self.assertEqual(list(capture.contexts()), [(0, 192, 0, 12), (192, 128, 12, 8)])

    def test_what_does_not_fit_is_refused(self):
        good = numbers()

        def lacking(name):
            return {other: values for other, values in good.items() if other != name}

        def noted(**changes):
            return good, {
                key: value for key, value in {**METADATA, **changes}.items() if value is not None
            }

        for words, (tensors, metadata) in [
            ("kvant-capture-1", noted(format=None)),
            ("kvant-capture-1", noted(format="kvant-capture-2")),
            ("shapes of layer 1", noted(tokens="319")),
            ("tokens", noted(tokens="-1")),
            ("tokens", noted(tokens="9" * 20)),
            ("ctx", noted(ctx="0")),
            ("shapes of layer 1", noted(ctx="100")),  # other queries would be kept
            ("query_step", noted(query_step="16x")),
            ("attention", noted(**{"layers.1.attention": None})),
            ("attention", noted(**{"layers.1.attention": "0.25 nan 0"})),
            ("attention", noted(**{"layers.1.attention": "0.25 0"})),
            ("windows", (lacking("windows"), METADATA)),
            ("windows", ({**good, "windows": good["windows"][:1]}, METADATA)),
            ("shapes", ({**good, "windows": -good["windows"]}, METADATA)),
            ("lacks keys", (lacking("layers.1.v"), METADATA)),
            ("no layer", ({"windows": good["windows"]}, METADATA)),
            ("F16", ({**good, "layers.1.v": good["layers.1.v"].astype("<f4")}, METADATA)),
            ("F16", ({**good, "layers.1.v": good["layers.1.v"][0]}, METADATA)),
            ("shapes", ({**good, "layers.1.v": good["layers.1.v"][:1]}, METADATA)),
            ("shapes", ({**good, "layers.1.k": good["layers.1.k"][:, :-1]}, METADATA)),
            ("shapes", ({**good, "layers.1.q": good["layers.1.q"][:, :, :8]}, METADATA)),
            ("shapes", ({**good, "layers.1.q": good["layers.1.q"][:3]}, METADATA)),
        ]:
            with self.subTest(
                words=words,
                metadata=metadata,
                tensors={name: v.shape for name, v in tensors.items()},
            ):
                write(self.path, tensors, metadata)
                with self.assertRaises(Damaged) as caught:
                    captures.Capture(self.path)
                self.assertTrue(str(caught.exception).startswith(f"{self.path}: "))
                self.assertIn(words, str(caught.exception))

    def test_files_that_are_cut_short(self):
        write(self.path, numbers())
        whole = self.path.read_bytes()
        for length in (0, 7, 8, 100, 2000, 40000, len(whole) - 1):
            self.path.write_bytes(whole[:length])
            self.assertRaises(Damaged, captures.Capture, self.path)


def plain_attention(query, head, tensors, back=None):
    """One query's output in binary64. `back` replaces the rows of one role."""
    k, v = (
        back.get(kind, tensors[f"layers.1.{kind}"]).astype(float)[head // (HEADS // KV_HEADS)]
        for kind in "kv"
    )
    context = 0 if query < CTX // STEP else CTX
    position = context + (query - context // STEP + 1) * STEP - 1
    first = max(context, position + 1 - WINDOW)
    weights = np.exp(
        0.25 * k[first : position + 1] @ tensors["layers.1.q"].astype(float)[head, query]
    )
    return weights @ v[first : position + 1] / weights.sum()


def through_codec(spec, role, rows):
    """Every page of these codecs is encoded alone and token by token, so plain encode and decode
    give the same rows as the cache.
    """
    codec = kvant.Codec(spec, rows.shape[2], role)
    return np.stack([codec.decode(codec.encode(head.astype("f4")), TOKENS) for head in rows])


def plain_errors(spec, role, tensors, n_ctx, first):
    back = {role: through_codec(spec, role, tensors[f"layers.1.{role}"])}
    errors, size = np.zeros(KV_HEADS), 0.0
    for query in range(QUERIES):
        in_context = query % (CTX // STEP)
        if not first <= (in_context + 1) * STEP - 1 < n_ctx:
            continue
        for head in range(HEADS):
            exact = plain_attention(query, head, tensors, {})
            coded = plain_attention(query, head, tensors, back)
            errors[head // (HEADS // KV_HEADS)] += ((coded - exact) ** 2).sum()
            size += (exact**2).sum()
    return errors / size


class Errors(InAFolder):
    def setUp(self):
        super().setUp()
        self.tensors = numbers()
        write(self.path, self.tensors)
        capture = captures.Capture(self.path)
        self.addCleanup(capture.close)
        self.rows = layer_error.LayerRows([capture], LAYER, CTX, CTX // 2)

    def test_errors_are_those_of_a_plain_computation(self):
        for spec, *window in (
            ("int-2", CTX, CTX // 2),
            ("turboquant-4", CTX, 0),
            ("trellis-3", 96, 24),
            ("f16", CTX, CTX // 2),
        ):
            with captures.Capture(self.path) as capture:
                rows = layer_error.LayerRows([capture], LAYER, *window)
            for role, dim in (("k", DIM_K), ("v", DIM_V)):
                found = rows.error(role, [kvant.Codec(spec, dim, role)] * KV_HEADS)
                # fp32 sums of up to 100 terms: relative errors of outputs are below 1e-5. The f16
                # codec has no other error.
                plain = plain_errors(spec, role, self.tensors, *window)
                np.testing.assert_allclose(
                    np.sqrt(found), np.sqrt(plain), atol=1e-5, err_msg=f"{spec} {role}"
                )
                self.assertTrue(sum(found) < 1e-10 if spec == "f16" else sum(found) > 1e-4)

    def test_captures_count_together(self):
        """With the same text twice, every sum is twice as large and their quotient is the same."""
        codecs = [kvant.Codec("int-3", DIM_V, "v")] * KV_HEADS
        with captures.Capture(self.path) as a, captures.Capture(self.path) as b:
            twice = layer_error.LayerRows([a, b], LAYER, CTX, CTX // 2)
        np.testing.assert_allclose(
            twice.error("v", codecs), self.rows.error("v", codecs), rtol=1e-12
        )

    def test_the_first_contexts_alone(self):
        """As if the capture had no other layers."""
        codecs = [kvant.Codec("int-3", DIM_V, "v")] * KV_HEADS
        short = {
            name: t if name == "windows" else t[:, : CTX // STEP if name.endswith("q") else CTX]
            for name, t in self.tensors.items()
        }
        with captures.Capture(self.path) as capture:
            found = layer_error.LayerRows([capture], LAYER, CTX, CTX // 2, 1).error("v", codecs)
        write(
            self.path,
            {name: np.ascontiguousarray(t) for name, t in short.items()},
            {**METADATA, "tokens": str(CTX)},
        )
        with captures.Capture(self.path) as capture:
            wanted = layer_error.LayerRows([capture], LAYER, CTX, CTX // 2).error("v", codecs)
        np.testing.assert_allclose(found, wanted, rtol=1e-12)

    def test_alibi_is_refused(self):
        write(self.path, self.tensors, {**METADATA, "layers.1.attention": "0.25 8 0"})
        with (
            captures.Capture(self.path) as capture,
            self.assertRaisesRegex(layer_error.Unsupported, "ALiBi"),
        ):
            layer_error.LayerRows([capture], LAYER, CTX, CTX // 2)

    def test_a_softcap_bounds_scores(self):
        """With a cap far below the scores, all weights are nearly equal, so keys hardly matter."""
        write(self.path, self.tensors, {**METADATA, "layers.1.attention": "0.25 0 0.001"})
        codecs = [kvant.Codec("int-2", DIM_K, "k")] * KV_HEADS
        with captures.Capture(self.path) as capture:
            capped = layer_error.LayerRows([capture], LAYER, CTX, CTX // 2).error("k", codecs)
        self.assertTrue(0 < sum(capped) < 1e-3 * sum(self.rows.error("k", codecs)))


if __name__ == "__main__":
    unittest.main()
