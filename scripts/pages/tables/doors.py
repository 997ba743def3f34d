"""Codecs by program: what each door answered (tests/doors), and measured speeds of attention."""

from results import has, like
from speed import DECODE, gpu_pair, gpus, ratio
from tables import vllm
from text import code, table, times

FILE = "doors.csv"
REFERENCE = 0.5  # a codec that is slower than this part of an exact cache's speed is of no use
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


def _speed(faster):
    return times(faster) + (", a reference" if faster < REFERENCE else "")


def _on_cpu(results, spec):
    """Times f16 of ggml in the same run; the longest context that was measured."""
    wanted = dict(library="kvant", k=spec, v=spec, head_dim="128", gqa="4", queries="1")
    for tokens in ("32768", "4096"):
        line = results.maybe("cpu_attention.csv", {**wanted, "tokens": tokens})
        if line:
            return _speed(line.number("times_f16"))
    return ""


def _on_gpu(results, spec):
    """Times bf16 of cuDNN, in the same run where both were measured."""
    ours, theirs = {**SHAPE, "codec": spec}, {**SHAPE, "codec": "cudnn-bf16"}
    pair = results.pair("cuda_attention.csv", ours, theirs, ("machine", "commit", "command"))
    if pair:
        line, rival = pair
    else:
        line = results.maybe("cuda_attention.csv", ours) or results.maybe(
            "cuda_any.csv", {**ours, "query tokens": "1"}
        )
        rival = results.newest("cuda_attention.csv", theirs)
    return _speed(rival.number("us") / line.number("us")) if line else ""


def _in_llama(results, spec):
    """llama.cpp's decoding at 32k on a GPU, times f16 of the same run."""
    pairs = (
        gpu_pair(results, spec, machines, DECODE, 32768)
        for name, machines in gpus(results).items()
        if name == "H200" and spec != "f16"
    )
    return "".join(times(ratio(pair, "tokens/s")) for pair in pairs if pair)


def _in_vllm(results, spec):
    """vLLM's decoding of 8 sequences of 32,768 tokens, times bfloat16 of the same run."""
    of = {**vllm.LLAMA, "command": vllm.ONE, "batch": "8", "context": "32768"}
    of |= {"device": has("H200"), "tpot_ms": like(".+")}
    ours, rival = ({**of, "cache": cache} for cache in (spec.replace("-", ""), vllm.RIVAL))
    pair = results.pair(vllm.FILE, ours, rival, vllm.RUN)
    return times(1 / ratio(pair, "tpot_ms")) if pair else ""


def doors_speed(results):
    """Speed by codec: attention on a CPU and on an H200, decoding in llama.cpp and in vLLM."""
    rows = []
    for codec in _answers(results):
        cells = [make(results, codec) for make in (_on_cpu, _on_gpu, _in_llama, _in_vllm)]
        if any(cells):
            rows.append([_spec(codec), *cells])
    heading = ["codec", "attention, CPU, times `f16`", "attention, H200, times bf16"]
    heading += ["llama.cpp, H200, times `f16`", "vLLM, H200, times bf16"]
    return table(heading, *rows)
