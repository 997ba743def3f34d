"""struct_sizes.py - every function of the public headers that takes or fills a struct with a size
field is in test_struct_sizes.c or test_cuda_struct_sizes.c, by a CHECK_GIVEN or CHECK_FILLED."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
POINTER = re.compile(r"(?:const )?(kvant_\w+) \*(?!\*)")


def declared():
    """{(function, struct)}: structs that other ones point to count for their functions, too."""
    text = "".join(p.read_text() for p in sorted((ROOT / "include/kvant").glob("*.h")))
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    bodies = dict(re.findall(r"typedef struct (kvant_\w+) \{\s*size_t size;(.*?)\n\}", text, re.S))
    pairs = set()
    for function, arguments in re.findall(r"KVANT_API [^;(]*?(kvant_\w+)\(([^;]*)\);", text):
        for struct in POINTER.findall(arguments):
            found = [struct, *POINTER.findall(bodies.get(struct, ""))]
            pairs |= {(function, name) for name in found if name in bodies}
    assert len(bodies) > 30 and len(pairs) > 50, "this check finds too little"
    return pairs


def tested():
    text = "".join((ROOT / "tests/unit" / name).read_text() for name in sys.argv[1:])
    pairs = set(re.findall(r"CHECK_(?:GIVEN|FILLED)\((kvant_\w+),\s*(kvant_\w+),", text))
    rows = re.findall(r"^    X\((\w+), (kvant_\w+), \w+\)", text, re.M)  # of TABLE
    return pairs | {(f"kvant_cuda_{name}", struct) for name, struct in rows}


missing, gone = declared() - tested(), tested() - declared()
for function, struct in sorted(missing):
    print(f"{function} and its {struct}: no test of sizes")
for function, struct in sorted(gone):
    print(f"{function} and its {struct} are tested, but not declared")
sys.exit(1 if missing or gone else 0)
