"""Codecs by program: what each door answered (tests/doors), and measured speeds of attention."""

from text import code, table, times

FILE = "doors.csv"
REFERENCE = 0.5  # a codec that is slower than this part of f16's speed is no use on a CPU
# 8 sequences of 32,768 tokens; 32 query heads and 8 kv heads of 128.
SHAPE = dict(batch="8", heads="32", kv_heads="8", head_dim="128", tokens="32768")


def _answers(results):
    """{codec: {door: answer}}, both in the order of the file."""
    found = {}
    for line in results.lines(FILE):
        results.used.append((line, []))
        found.setdefault(line["codec"], {})[line["door"]] = line["answer"]
    return found


def _spec(codec):
    """A codec as a page writes it: specs are code, a remark after a comma and a blank is not."""
    spec, comma, remark = codec.partition(", ")
    return code(spec) + comma + remark


def doors(results):
    """Which program serves which codec, as tests/doors asked them."""
    found = _answers(results)
    names = list(dict.fromkeys(door for answers in found.values() for door in answers))
    rows = []
    for codec, answers in found.items():
        cells = ("" if x not in answers else "no" if answers[x] else "yes" for x in names)
        rows.append([_spec(codec), *cells])
    return table(["codec", *names], *rows)


def doors_cpu_only(results):
    """The codecs that no program serves on a GPU."""
    only = (
        _spec(codec)
        for codec, answers in _answers(results).items()
        if all(answer for door, answer in answers.items() if door.endswith("GPU"))
    )
    return "; ".join(only)


def _on_cpu(results, spec):
    """Times f16 of ggml in the same run; the longest context that was measured."""
    wanted = dict(library="kvant", k=spec, v=spec, head_dim="128", gqa="4", queries="1")
    for tokens in ("32768", "4096"):
        line = results.maybe("cpu_attention.csv", {**wanted, "tokens": tokens})
        if line:
            faster = line.number("times_f16")
            return times(faster) + (", a reference" if faster < REFERENCE else "")
    return ""


def _on_gpu(results, spec):
    """Times bf16 of cuDNN: its newest time over the codec's newest."""
    line = results.maybe("cuda_attention.csv", {**SHAPE, "codec": spec}) or results.maybe(
        "cuda_any.csv", {**SHAPE, "codec": spec, "query tokens": "1"}
    )
    rival = results.newest("cuda_attention.csv", {**SHAPE, "codec": "cudnn-bf16"})
    return times(rival.number("us") / line.number("us")) if line else ""


def doors_speed(results):
    """Speed of decode attention by codec: times ggml's f16 on CPUs, cuDNN's bf16 on GPUs."""
    rows = []
    for codec in _answers(results):
        cells = [_on_cpu(results, codec), _on_gpu(results, codec)]
        if any(cells):
            rows.append([_spec(codec), *cells])
    heading = ["codec", "CPU, times `f16` of ggml", "H200, times bf16 of cuDNN"]
    return table(heading, *rows)
