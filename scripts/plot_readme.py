#!/usr/bin/env python3
"""Draws README's picture, memory of a cache and what it loses on three models, as docs/guide/quality-light.svg and
-dark.svg.

    scripts/plot_readme.py            # writes both
    scripts/plot_readme.py --check    # fails when a file differs from what the results say

Divergences are rows of bench/results/quality.csv (llama.cpp's types) and quality_presets.csv (presets, calibrated).
GiB are computed: keys and values of 32 layers, 8 kv heads of 128 numbers, 32768 tokens.
"""

import argparse
import csv
import math
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODELS = {"SmolLM2-135M": "SmolLM2-135M", "Qwen2.5-Coder-0.5B": "Qwen2.5-Coder-0.5B", "Gemma-3-270M": "Gemma-3-270M"}
NUMBERS = 2 * 32 * 8 * 128 * 32768
SCALE = 16 / 128  # bits per number of one fp16 scale per row
# Name, (keys' bits, values' bits); head_dim 128.
CACHES = {"q8_0": (8.5, 8.5), "quality": (6 + SCALE, 4 + SCALE), "q4_0": (4.5, 4.5),
          "balanced": (4 + SCALE, 4 + SCALE), "small": (3 + SCALE, 3 + SCALE)}
PRESETS = ("quality", "balanced", "small")
COLORS = {"light": {"back": "#ffffff", "text": "#1f2328", "soft": "#59636e", "grid": "#d1d9e0", "ours": "#0969da",
                    "stock": "#9a6700"},
          "dark": {"back": "#0d1117", "text": "#f0f6fc", "soft": "#9198a1", "grid": "#3d444d", "ours": "#4493f8",
                   "stock": "#d29922"}}
WIDTH, LEFT, RIGHT, TOP, ROW = 800, 316, 770, 92, 52
TICKS = (0.003, 0.01, 0.03, 0.1, 0.3, 1)


def rows(name):
    with open(ROOT / "bench" / "results" / name, newline="") as file:
        return list(csv.DictReader(file))


def divergences():
    """{cache: {model: mean KL divergence}}"""
    found = {cache: {} for cache in CACHES}
    for row in rows("quality.csv"):
        if row["cache"] == "llama.cpp" and row["k"] == row["v"] and row["k"] in found:
            model = next(model for model in MODELS if row["model"].startswith(model))
            found[row["k"]][model] = float(row["kld_mean"])
    for row in rows("quality_presets.csv"):
        if row["preset"] in found and row["calibration"]:
            found[row["preset"]][row["model"]] = float(row["kld_mean"])
    missing = [(cache, model) for cache in found for model in MODELS if model not in found[cache]]
    if missing:
        sys.exit(f"no row for {missing}")
    return found


def gib(cache):
    return NUMBERS * sum(CACHES[cache]) / 2 / 8 / 2**30


def place(value):
    low, high = math.log(TICKS[0] * 0.9), math.log(TICKS[-1])
    return LEFT + (math.log(value) - low) / (high - low) * (RIGHT - LEFT)


def marker(model, x, y, color):
    shape = list(MODELS).index(model)
    if shape == 0:
        return f'<circle cx="{x:.1f}" cy="{y}" r="8" fill="{color}"/>'
    if shape == 1:
        return f'<rect x="{x - 7.5:.1f}" y="{y - 7.5}" width="15" height="15" fill="{color}"/>'
    return f'<path d="M{x:.1f} {y - 10} l10 17 h-20 z" fill="{color}"/>'


def text(x, y, words, fill, anchor="start", size=20, weight="normal"):
    return (f'<text x="{x:g}" y="{y:g}" fill="{fill}" text-anchor="{anchor}" font-size="{size}" '
            f'font-weight="{weight}">{words}</text>')


def picture(colors):
    found = divergences()
    bottom = TOP + ROW * len(CACHES)
    yield (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 104}" '
           'font-family="system-ui, sans-serif" role="img" aria-label="Memory of key-value caches and their divergence '
           'from an f16 cache on three models">')
    yield f'<rect width="100%" height="100%" fill="{colors["back"]}"/>'
    yield text(20, 38, "What a smaller cache loses", colors["text"], size=25, weight="bold")
    yield text(20, 70, "cache, 8B model at 32k", colors["soft"])
    yield text(RIGHT, 70, "mean KL divergence from f16 (less is better)", colors["soft"], "end")
    for tick in TICKS:
        yield f'<path d="M{place(tick):.1f} {TOP - 6} V{bottom}" stroke="{colors["grid"]}"/>'
        yield text(place(tick), bottom + 24, f"{tick:g}", colors["soft"], "middle", 18)
    for number, cache in enumerate(CACHES):
        y = TOP + ROW * number + ROW // 2
        ours = cache in PRESETS
        color = colors["ours" if ours else "stock"]
        yield text(20, y + 7, ("kvant " if ours else "llama.cpp ") + cache, color, weight="bold" if ours else "normal")
        yield text(LEFT - 28, y + 7, f"{gib(cache) + 1e-9:.2f} GiB", colors["text"], "end")
        ends = [place(value) for value in found[cache].values()]
        yield f'<path d="M{min(ends):.1f} {y} H{max(ends):.1f}" stroke="{color}" stroke-width="3" opacity="0.4"/>'
        yield from (marker(model, place(value), y, color) for model, value in found[cache].items())
    x = 32
    for model in MODELS:
        yield marker(model, x, bottom + 62, colors["soft"])
        yield text(x + 18, bottom + 69, model, colors["text"])
        x += 68 + 11 * len(model)
    yield text(20, bottom + 96, "f16 takes 4.00 GiB. GiB are computed, divergences measured; presets calibrated.",
               colors["soft"], size=18)
    yield "</svg>"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    check = parser.parse_args().check
    for theme, colors in COLORS.items():
        path = ROOT / "docs" / "guide" / f"quality-{theme}.svg"
        drawn = "\n".join(picture(colors)) + "\n"
        if not check:
            path.write_text(drawn)
        elif path.read_text() != drawn:
            sys.exit(f"{path.relative_to(ROOT)} is not what bench/results says: run scripts/plot_readme.py")


if __name__ == "__main__":
    main()
