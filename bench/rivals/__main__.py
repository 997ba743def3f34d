#!/usr/bin/env python3
"""Measures the caches of other programs next to kvant's, in those programs themselves, and appends
lines to bench/results/rivals.csv. A second call continues where the first one stopped. With --speed
it measures speed instead, for bench/results/rivals_speed.csv.

    python3 bench/rivals -f wiki.test.raw --lengths 2048
    python3 bench/rivals -f wiki.test.raw --models smollm2 --only "kvant llama.cpp"
    python3 bench/rivals --speed --models smollm2
    python3 bench/rivals --list
"""

import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from programs import ROOT, BuildError  # noqa: E402
from quality import Run  # noqa: E402
from record import model_name, options_of  # noqa: E402
from speed import SpeedError, measure  # noqa: E402
from systems import SYSTEMS, needs_gpu  # noqa: E402


def fetch(*what):
    words = [sys.executable, ROOT / "scripts" / "fetch.py", *what]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return pathlib.Path(done.stdout.strip())


def parse_arguments():
    parser = options_of(__doc__)
    cpus = os.cpu_count() or 1
    parser.add_argument("-f", "--text", type=pathlib.Path, help="text to score")
    parser.add_argument(
        "--models", default="smollm2 qwen gemma", help="names of fetch.py, or files"
    )
    parser.add_argument(
        "--float", action="store_true", help="with a copy of the model whose weights have 16 bits"
    )
    parser.add_argument("--lengths", default="2048 8192", help="tokens of a chunk")
    parser.add_argument("--chunks", type=int, default=1, help="chunks to score (default 1)")
    parser.add_argument("--only", default="", help="names of programs (default: all)")
    parser.add_argument(
        "--caches", default="", help="names with semicolons, measured in this order (default: all)"
    )
    parser.add_argument(
        "--again", default="", help="programs whose lines in the CSV are measured again"
    )
    parser.add_argument("--gpu", action="store_true", help="programs that need CUDA, instead")
    parser.add_argument(
        "--cuda",
        type=pathlib.Path,
        help="folder of programs that bench/llama_cuda/build.sh made: llama.cpp and kvant on a GPU",
    )
    parser.add_argument("--threads", type=int, default=cpus, help="of a cache's program")
    parser.add_argument("--parallel", type=int, default=1, help="caches at a time (default 1)")
    parser.add_argument("--jobs", type=int, default=cpus, help="of builds")
    parser.add_argument("--kvant", default=ROOT / "build" / "bin" / "kvant")
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build" / "rivals")
    parser.add_argument(
        "-o", "--output", type=pathlib.Path, default=ROOT / "bench" / "results" / "rivals.csv"
    )
    parser.add_argument("--speed", action="store_true", help="measure speed; needs an idle machine")
    parser.add_argument("--rounds", type=int, default=2, help="of llama-bench (default 2)")
    parser.add_argument(
        "--speed-output", type=pathlib.Path, default=ROOT / "bench/results/rivals_speed.csv"
    )
    parser.add_argument("--list", action="store_true", help="print the caches and end")
    options = parser.parse_args()
    if options.text is None and not (options.list or options.speed):
        parser.error("-f TEXT is missing")
    for name in ("text", "kvant", "work", "output", "speed_output", "cuda"):
        if path := getattr(options, name):
            setattr(options, name, pathlib.Path(path).resolve())
    return options


def choose(options):
    programs = options.only.split()
    caches = [name for name in options.caches.split(";") if name]
    found = [
        system
        for system in SYSTEMS
        if (not programs or system.program in programs)
        and (not caches or system.cache in caches)
        and needs_gpu(system) == options.gpu
    ]
    return sorted(found, key=lambda system: caches.index(system.cache)) if caches else found


def main():
    options = parse_arguments()
    chosen = choose(options)
    if options.list:
        print("\n".join(f"{system.program} {system.cache}" for system in chosen))
        return 0
    options.work.mkdir(parents=True, exist_ok=True)
    return measure_speed(options, chosen) if options.speed else measure_quality(options, chosen)


def find_models(options):
    for name in options.models.split():
        path = pathlib.Path(name).resolve()
        path = path if path.is_file() else fetch("model", name)
        yield with_float_weights(path, options.work) if options.float else path


def with_float_weights(model, work):
    made = work / f"{model_name(model)}-float.F16.gguf"
    if not made.exists():
        part = made.with_suffix(".part")
        words = [fetch("torch"), HERE / "float_weights.py", model, part]
        subprocess.run(words, check=True)
        part.rename(made)
    return made


def measure_speed(options, chosen):
    for model in find_models(options):
        for system in chosen:
            try:
                measure(options, system, model)
            except (BuildError, SpeedError) as error:
                print(f"rivals: {error}", file=sys.stderr)
    return 0


def measure_quality(options, chosen):
    for length in map(int, options.lengths.split()):
        for model in find_models(options):
            try:
                Run(options, model, length).all(chosen, SYSTEMS)
            except BuildError as error:
                print(f"rivals: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
