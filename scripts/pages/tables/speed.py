"""README's table of speed: CPUs and GPUs together."""

import speed
from caches import context_name
from text import table, times

CPU_SPEED = "decode_tps"


def decode_speed(results):
    """Decode speed of balanced relative to f16 by tokens in the cache, on every CPU and GPU."""
    rows = []
    for name in speed.cpus(results):
        pairs = [speed.cpu_pair(results, "balanced", name, d, CPU_SPEED) for d in speed.COLUMNS]
        cells = [times(speed.ratio(p, CPU_SPEED)) if p else "" for p in pairs]
        if any(cells):
            rows.append([f"{speed.CPU_MODEL}, {name}", *cells])
    for gpu, names in speed.gpus(results).items():
        pairs = [speed.gpu_pair(results, "balanced", names, speed.DECODE, d) for d in speed.COLUMNS]
        cells = [times(speed.ratio(p, "tokens/s")) if p else "" for p in pairs]
        rows.append([f"{speed.GPU_MODEL}, NVIDIA {gpu}", *cells])
    return table(["tokens in the cache", *map(context_name, speed.COLUMNS)], *rows)
