"""layouts.py - prints a C program that compares the Python package with the C headers. It compares
the size of every structure of kvant/structs.py, and the offset and the size of every field. It also
compares every number that has the name of a C constant behind it. The program names each difference
and then fails.

CodecInfo is kvant_codec_info, CudaPages is kvant_cuda_pages; a field `from_` is C's `from`.
"""

import ctypes as c
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "integrations" / "python"))

from kvant import structs  # noqa: E402

START = """#include <kvant/block_attention.h>
#include <kvant/cache.h>
#include <kvant/calibration.h>
#include <kvant/cuda_kernels.h>
#include <kvant/executor.h>
#include <kvant/index.h>
#include <kvant/tensor_hooks.h>
#include <stdio.h>

#include "store/rules.h"

static int compare(const char *what, size_t python, size_t c)
{
    if (python != c)
        printf("%s: %zu in Python, %zu in C\\n", what, python, c);
    return python != c;
}

int main(void)
{
    int wrong = 0;
"""


def c_name(struct):
    return "kvant" + re.sub(r"([A-Z])", lambda match: "_" + match[1].lower(), struct.__name__)


def checks(struct):
    name = c_name(struct)
    yield f"sizeof({name})", c.sizeof(struct)
    begin = structs.Struct._fields_ if issubclass(struct, structs.Struct) else []
    for field, _ in begin + struct._fields_:
        place, member = getattr(struct, field), field.rstrip("_")
        yield f"offsetof({name}, {member})", place.offset
        yield f"sizeof((({name} *)0)->{member})", place.size


def constants():
    """(name in C, number) of lines `NAME = NUMBER  # KVANT_NAME`."""
    line = re.compile(r"^_?[A-Z_]+ = ([0-9][^#\n]*?) +#:? (KVANT_[A-Z_]+)\b", re.M)
    for path in sorted((ROOT / "integrations" / "python" / "kvant").rglob("*.py")):
        for number, name in line.findall(path.read_text()):
            yield name, eval(number)


def main():
    here = [
        s
        for s in vars(structs).values()
        if isinstance(s, type)
        and issubclass(s, c.Structure)
        and hasattr(s, "_fields_")
        and s is not structs.Struct
    ]
    assert len(here) > 20, "structs.py has lost its structures"
    lines = [
        f'    wrong |= compare("{what}", {number}, {what});'
        for struct in here
        for what, number in checks(struct)
    ]
    found = list(constants())
    assert len(found) > 8, "the package names no constants of C"
    lines += [f'    wrong |= compare("{name}", {number}, {name});' for name, number in found]
    print(START + "\n".join(lines) + "\n    return wrong;\n}")


if __name__ == "__main__":
    main()
