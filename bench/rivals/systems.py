"""The programs that kvant is compared with, each at a pinned commit, and their caches. It does not
know how they are built (programs.py) or measured (quality.py, speed.py).

llama.cpp's own programs come from scripts/fetch.py and are not built here."""

from typing import NamedTuple


class Program(NamedTuple):
    """A fork of llama.cpp. wheel is a package of PyPI, its version and its SHA-256. The package has
    the fork's libraries, built at this commit. Only the programs are compiled here. A program with
    gpu is built with CUDA, because its caches need it, and is measured with --gpu only."""

    address: str
    commit: str
    wheel: tuple = ()
    gpu: bool = False


class System(NamedTuple):
    """A cache of a program. Every program has a cache named f16, which is the reference for its
    caches."""

    program: str
    cache: str
    words: tuple = ()


PROGRAMS = {
    "ik_llama.cpp": Program(
        "https://github.com/ikawrakow/ik_llama.cpp",
        "55d3c05bf7b377deaa5dc84d255d9740a345a206",
        (
            "ik-llama-cpp-python",
            "0.1.5",
            "52408f31dd05d16ada53b041155f14ec1fee9acd6ab0b4b4f77de04bd565bd67",
        ),
    ),
    "llama-cpp-turboquant": Program(
        "https://github.com/TheTom/llama-cpp-turboquant",
        "69d8e4be47243e83b3d0d71e932bc7aa61c644dc",
    ),
    "buun-llama-cpp": Program(
        "https://github.com/spiritbuun/buun-llama-cpp",
        "1c478819233f28b90be647040cac1ca7f4ee1c9c",
        gpu=True,
    ),
}

# llama.cpp's programs print the size of the cache only when they are asked to.
LOUD = {"llama.cpp": ("-lv", "4")}

# The pinned build of ik_llama.cpp multiplies Q4_1 weights wrongly in large batches. SmolLM2 then
# has a perplexity of 61 instead of 12. Its caches do not depend on the batch.
QUIRKS = {("ik_llama.cpp", "SmolLM2-135M"): ("-ub", "16")}

# kvant is measured in llama.cpp's own programs, against the same f16 as llama.cpp's caches.
HOSTS = {"kvant": "llama.cpp"}


def both(program, kind, *words, name=None):
    """One type for keys and values."""
    return System(program, name or kind, ("-ctk", kind, "-ctv", kind, *words))


def named(keys, values, what, option):
    """kvant's codecs by name, with something that is learned from the first keys."""
    words = ("-k", f"{keys}:{option}", "-v", values)
    return System("kvant", f"{keys}/{values}, {what}", words)


def trellis(keys, values, what, option):
    return named(f"trellis-{keys}", f"trellis-{values}", what, option)


SYSTEMS = [
    *(both("llama.cpp", kind) for kind in ("f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")),
    *(
        System("kvant", preset, ("--preset", preset))
        for preset in ("quality", "balanced", "small", "tiny")
    ),
    # Codecs by name keep the first 64 tokens exact and no newest ones, so they need fewer bits than
    # presets in short contexts.
    *(
        named(f"turboquant-{k}", f"turboquant-{v}", "W", "transform=first")
        for k, v in ((8, 8), (7, 7), (6, 5), (5, 5))
    ),
    *(named(f"turboquant-{n}", f"turboquant-{n}", "centre", "center=first") for n in (8, 6)),
    *(trellis(*bits, "W", "transform=first") for bits in ((4, 4), (4, 3), (3, 3), (3, 2), (2, 2))),
    *(trellis(*bits, "centre", "center=first") for bits in ((3, 3), (3, 2), (2, 2))),
    # Nothing is rounded: this cache differs from f16 by the noise of the program's other products.
    System("kvant", "exact", ("-k", "f16", "-v", "f16")),
    *(both("ik_llama.cpp", kind) for kind in ("f16", "q8_0", "q6_0", "q4_0")),
    # This commit aborts when values are q8_KV, too.
    System("ik_llama.cpp", "q8_KV, values q8_0", ("-ctk", "q8_KV", "-ctv", "q8_0")),
    System("ik_llama.cpp", "q4_0, Hadamard", ("-ctk", "q4_0", "-ctv", "q4_0", "-khad", "-vhad")),
    *(
        both("llama-cpp-turboquant", kind)
        for kind in ("f16", "q8_0", "q4_0", "turbo4", "turbo3", "turbo2")
    ),
    *(
        both("buun-llama-cpp", kind)
        for kind in ("f16", "turbo4", "turbo3", "turbo2", "turbo3_tcq", "turbo2_tcq")
    ),
]


def needs_gpu(system):
    return system.program in PROGRAMS and PROGRAMS[system.program].gpu
