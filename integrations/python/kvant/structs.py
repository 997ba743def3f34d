"""The structures and the functions of include/kvant/*.h for ctypes, read from the headers.

A structure is its name in C without kvant_: CudaRows is kvant_cuda_rows. A field whose name is a
keyword of Python ends in an underscore. tests/python/layouts.py prints how C lays the structures
out, and a test compares."""

from __future__ import annotations

import ctypes as c
import keyword
import pathlib
import re
from typing import TYPE_CHECKING, Any

MAX_TRANSFORMS = 12  # KVANT_MAX_TRANSFORMS
ALLOW = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_uint64)  # of IndexQuery


class Struct(c.Structure):
    """Structures of kvant that begin with their size; new() fills it in."""

    _fields_ = [("size", c.c_size_t)]

    @classmethod
    def new(cls, **fields: Any) -> Any:
        return cls(size=c.sizeof(cls), **fields)

    def plain(self) -> dict[str, Any]:
        """Fields as Python's own types: no size, text instead of bytes. Pointers stay numbers or
        None."""
        values = {name: getattr(self, name) for name, *_ in self._fields_}
        return {
            name: value.decode(errors="replace") if isinstance(value, bytes) else value
            for name, value in values.items()
        }


# Types by their names in C; the headers add their enums and structures.
_TYPES: dict[str, Any] = {
    "void": None, "bool": c.c_bool, "int": c.c_int, "size_t": c.c_size_t, "uint8_t": c.c_uint8,
    "uint16_t": c.c_uint16, "uint32_t": c.c_uint32, "uint64_t": c.c_uint64, "int32_t": c.c_int32,
    "int64_t": c.c_int64, "float": c.c_float, "double": c.c_double, "kvant_cuda_stream": c.c_void_p,
}  # fmt: skip


def _headers() -> str:
    """All headers without comments. An installed package has copies, a source tree has them in
    include/."""
    here = pathlib.Path(__file__).resolve().parent
    folder = here / "include"
    if not folder.is_dir():
        folder = here.parents[2] / "include" / "kvant"
    texts = [path.read_text("utf-8") for path in sorted(folder.glob("*.h"))]
    return re.sub(r"/\*.*?\*/", "", "\n".join(texts), flags=re.S)


def _type(base: str, stars: int) -> Any:
    """A pointer to a structure has its type, so that it takes the structure itself. Other pointers
    are void, because the callers have addresses."""
    kind = _TYPES.get(base)
    if stars and base == "char":
        kind, stars = c.c_char_p, stars - 1
    elif stars and not (isinstance(kind, type) and issubclass(kind, c.Structure)):
        kind, stars = c.c_void_p, stars - 1
    for _ in range(stars):
        kind = c.POINTER(kind)
    return kind


def _declared(text: str) -> list[tuple[str, Any]]:
    """Names and types of `const float *a, *b[2]`."""
    if "(*" in text:  # a pointer to a function
        return [(text.partition("(*")[2].partition(")")[0], c.c_void_p)]
    base, names = re.sub(r"\bconst\b", "", text).split(None, 1)
    found = []
    for declarator in names.split(","):
        name, _, length = declarator.strip("* \n]").partition("[")
        kind = _type(base, declarator.count("*"))
        if length:
            kind *= int(eval(length, {}, _constants))
        found.append((name + "_" * keyword.iskeyword(name), kind))
    return found


_text = _headers()
_constants = {name: int(n) for name, n in re.findall(r"\b(KVANT_\w+)(?: =)? (\d+)u?\b", _text)}
_TYPES.update(dict.fromkeys(re.findall(r"\btypedef enum (\w+)", _text), c.c_int))

for _name, _body in re.findall(r"^typedef struct (\w+) \{(.*?)^\}", _text, re.M | re.S):
    _fields = [field for line in _body.split(";") if line.strip() for field in _declared(line)]
    _sized = _fields[0] == Struct._fields_[0]
    _TYPES[_name] = type(
        _name.removeprefix("kvant").title().replace("_", ""),
        (Struct if _sized else c.Structure,),
        {"_fields_": _fields[_sized:]},
    )
    globals()[_TYPES[_name].__name__] = _TYPES[_name]

# Result and arguments by name. A parameter that is an array is a pointer.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {}
for _declaration, _arguments in re.findall(r"^KVANT_API (.*?)\((.*?)\);", _text, re.M | re.S):
    _parameters = re.sub(r"(\w+)\[\w+\]", r"*\1", _arguments).split(",")
    _types = [_declared(text)[0][1] for text in _parameters if text != "void"]
    [(_name, _result)] = _declared(_declaration)
    FUNCTIONS[_name] = (_result, _types)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
