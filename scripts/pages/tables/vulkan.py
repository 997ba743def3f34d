"""The proof of a Vulkan back end: bench/vulkan, next to the library's other ways to compute."""

from text import significant, table, thousands

SET_ROWS, ATTENTION = "SET_ROWS of one token", "attention of one token"
BOTH = "both, from submission to the CPU's return, cache warm"


def vulkan_proof(results):
    """Times of a layer's shaders for a decoded token of each sequence, in microseconds."""
    shapes = {}
    for line in results.lines("vulkan.csv"):
        shapes.setdefault((line["sequences"], line["tokens"], line["device"]), None)
    rows = []
    for sequences, tokens, device in shapes:
        of = {"sequences": sequences, "tokens": tokens, "device": device}
        found = [
            results.maybe("vulkan.csv", {**of, "what": what})
            for what in (SET_ROWS, ATTENTION, BOTH)
        ]
        cells = [significant(x.number("us")) if x else "" for x in found]
        rows.append([device, f"{sequences} x {thousands(int(tokens))}", *cells])
    heading = [
        "computed by",
        "sequences x tokens",
        "SET_ROWS",
        "attention",
        "both, and the CPU waits",
    ]
    return table(heading, *rows)
