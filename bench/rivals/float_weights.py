#!/usr/bin/env python3
"""Copies a model with its weights as 16-bit numbers. Programs round activations to 8 bits before
they multiply them with quantised weights, so caches that differ in the last bit differ visibly in
their answers. With 16-bit weights a divergence is the cache's own.

    python3 scripts/fetch.py torch      # prints the Python that this needs
    PYTHON bench/rivals/float_weights.py model.Q4_K_M.gguf model-float.F16.gguf"""

import pathlib
import sys

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize

FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16)


def copy_fields(reader, writer):
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, inner)


def main():
    model, output = map(pathlib.Path, sys.argv[1:])
    reader = GGUFReader(model)
    writer = GGUFWriter(output, arch=reader.fields["general.architecture"].contents())
    copy_fields(reader, writer)
    for tensor in reader.tensors:
        data = tensor.data
        if tensor.tensor_type not in FLOATS:
            data = dequantize(data, tensor.tensor_type).astype(np.float16)
        writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
