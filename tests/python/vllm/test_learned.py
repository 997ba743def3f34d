"""Transforms that a server learns while pages hold rows, in both backends without an engine."""

import pathlib
import sys
import unittest
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "pytorch")]

import torch  # noqa: E402
from common import TestCase, np  # noqa: E402

import kvant  # noqa: E402
from kvant.vllm import codecs, gpu  # noqa: E402
from steps import (  # noqa: E402
    CHUNKS,
    CpuImpl,
    DECODES,
    DEVICE,
    DIM,
    GROUP,
    HEADS,
    KV_HEADS,
    LAYER,
    Step,
    made_builder,
    made_impl,
    made_memory,
    round_trip,
)


class Cases:
    kind = None

    def test_transforms_that_are_learned_while_pages_hold_rows(self):
        """Rows are encoded with the identity, and again with learned transforms. A GPU decodes them
        to fp16 in between, which may move a code of 8 bits by one step: less than 2^-6 of the
        largest output.
        """
        made = made_impl("int-8:transform=file,sink=0/int-8:center=file,sink=0", kind=self.kind)
        step = Step(DECODES + CHUNKS, torch.float32)
        made.stored = made.stored._replace(learns=True)
        memory = made_memory(made)
        calibrator = kvant.Calibrator(model="rows")
        with mock.patch.object(codecs.learned, "calibration", None):
            pages_of_layer, first = made._pages(step.layer, memory), round_trip(made)
            for i, (n, _) in enumerate(step.sequences):
                step.rows[i][0] += torch.linspace(-20, 20, DIM)
                pages_of_layer.write(
                    *(x.to(DEVICE) for x in step.rows[i]), step.slots(i, 0, n).to(DEVICE)
                )
                for role, x in zip("kv", step.rows[i]):
                    for layer in (0, LAYER):
                        calibrator.add_rows(layer, role, x.numpy())
            for head in range(KV_HEADS):
                calibrator.add_queries(LAYER, head, step.queries[:, head * GROUP].numpy())
            once = [[torch.from_numpy(x) for x in first(*rows)] for rows in step.rows]
            codecs.learned.calibration = calibrator.finish()
            used = memory.flatten(1).any(1).tolist()
            pages_of_layer.relearn(memory)
            self.assertIn(False, used)
            self.assertEqual(memory.flatten(1).any(1).tolist(), used)  # the others stay empty
            step.rows, again = once, round_trip(made)
            newest = [x.to(DEVICE) for x in step.newest()[:2]]
            out = torch.zeros(len(step.queries), HEADS * DIM, device=DEVICE)
            made.forward(
                step.layer,
                step.queries.to(DEVICE),
                *newest,
                memory,
                made_builder().build(0, step.common()),
                out,
            )
            expected, found = step.expected(again), out.view(-1, HEADS, DIM).cpu().numpy()
            self.assertLess(np.abs(found - expected).max(), 2.0**-6 * np.abs(expected).max())


class Gpu(Cases, TestCase):
    kind = gpu.Impl


@unittest.skipIf(DEVICE == "cuda", "tensors are on the GPU")
class Cpu(Cases, TestCase):
    kind = CpuImpl


if __name__ == "__main__":
    unittest.main()
