"""Shapes and words of an SVG file, in the colours of a light or a dark page.

A phone shows a figure about 358 CSS pixels wide. All words must stay at least 11 pixels high there,
so WIDTH and SMALLEST go together, and Canvas refuses smaller words.
"""

import math
from xml.sax.saxutils import escape

WIDTH, SMALLEST = 520, 16
THEMES = {
    "light": {"back": "#ffffff", "text": "#1f2328", "soft": "#59636e", "grid": "#d1d9e0",
              "ours": "#0969da", "stock": "#9a6700", "fill": "#ddf4ff", "exact": "#fff8c5",
              "a": "#0969da", "b": "#1a7f37", "c": "#bc4c00", "d": "#8250df", "e": "#bf3989",
              "f": "#57606a"},
    "dark": {"back": "#0d1117", "text": "#f0f6fc", "soft": "#9198a1", "grid": "#3d444d",
             "ours": "#4493f8", "stock": "#d29922", "fill": "#132d4d", "exact": "#3b2e0a",
             "a": "#4493f8", "b": "#3fb950", "c": "#f0883e", "d": "#ab7df8", "e": "#f778ba",
             "f": "#b1bac4"},
}  # fmt: skip
MARKS = (
    "m-6 -6 h12 v12 h-12 z",
    "m0 -8 l8 14 h-16 z",
    "m0 -8.5 l8.5 8.5 -8.5 8.5 -8.5 -8.5 z",
    "m0 8 l8 -14 h-16 z",
    "m-2.5 -8 h5 v5.5 h5.5 v5 h-5.5 v5.5 h-5 v-5.5 h-5.5 v-5 h5.5 z",
)


class Canvas:
    """An SVG of WIDTH x height. Colours are names of a theme."""

    def __init__(self, theme, height, title):
        self.colors, self.height, self.title, self._shapes = THEMES[theme], height, title, []

    def text(self, x, y, words, color="text", anchor="start", size=SMALLEST, bold=False):
        if size < SMALLEST:
            raise ValueError(f"{words!r} would be too small on a phone")
        weight = ' font-weight="bold"' if bold else ""
        self._add(
            f'<text x="{x:.4g}" y="{y:.4g}" fill="{self.colors[color]}" text-anchor="{anchor}" '
            f'font-size="{size}"{weight}>{escape(words)}</text>'
        )

    def path(self, points, color="grid", width=1.0, dashes=""):
        """A line through points."""
        way = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dashes}"' if dashes else ""
        self._add(
            f'<path d="M{way}" fill="none" stroke="{self.colors[color]}" '
            f'stroke-width="{width}"{dashes}/>'
        )

    def rect(self, x, y, width, height, fill, stroke="soft"):
        self._add(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{self.colors[fill]}" stroke="{self.colors[stroke]}"/>'
        )

    def dot(self, x, y, color, radius=3.0, opacity=1.0):
        faint = f' opacity="{opacity}"' if opacity < 1 else ""
        fill = self.colors[color]
        self._add(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}"{faint}/>')

    def mark(self, number, x, y, color):
        """A marker: a disc, square, triangle, diamond, triangle on its head or cross, by number."""
        if number == 0:
            return self.dot(x, y, color, 6.5)
        way = MARKS[number - 1]
        self._add(f'<path d="M{x:.1f} {y:.1f} {way}" fill="{self.colors[color]}"/>')

    def series(self, number, name, points, y):
        """A line with its marks, in the colour of a number, and its name at height y."""
        color = "abcdef"[number]
        self.path(points, color, 2)
        for at in points:
            self.mark(number, *at, color)
        self.mark(number, 28, y - 6, color)
        self.text(44, y, name, "soft")

    def ratios(self, ticks, up, left, right):
        """Lines across at ratios; the one at 1, where nothing is gained or lost, is darker."""
        for tick in ticks:
            self.path([(left, up(tick)), (right, up(tick))], "soft" if tick == 1 else "grid")
            self.text(left - 10, up(tick) + 6, f"{tick:g}", "soft", "end")

    def lines(self):
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
            f'font-family="system-ui, sans-serif" role="img" aria-label="{escape(self.title)}">'
        )
        yield f'<rect width="100%" height="100%" fill="{self.colors["back"]}"/>'
        yield from self._shapes
        yield "</svg>"

    def _add(self, shape):
        self._shapes.append(shape)


class Scale:
    """Maps values between two ends to pixels between two places, linearly or by logarithms."""

    def __init__(self, ends, places, log=False):
        self.ends, self.places, self.log = ends, places, log

    def __call__(self, value):
        low, high, value = (math.log(x) if self.log else x for x in (*self.ends, value))
        first, last = self.places
        return first + (value - low) / (high - low) * (last - first)
