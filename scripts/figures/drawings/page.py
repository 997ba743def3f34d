"""A sequence of blocks of 64 tokens, and one sealed page: its codes and scales, to scale."""

from draw import WIDTH, Canvas
from text import thousands

TOKENS, HEAD_DIM = 64, 128
LEFT, RIGHT = 16, WIDTH - 16
SPEC = "trellis-4"  # the codec of keys and values in the preset balanced


def _page_bytes(results):
    """Bytes of codes and of scales of a sealed page of balanced, and of a page of fp16."""
    line = results.newest("codecs.csv", {"spec": SPEC, "head_dim": HEAD_DIM})
    scales = 2 * TOKENS
    sealed = line.number("bits") * TOKENS * HEAD_DIM / 8
    return sealed - scales, scales, 2 * TOKENS * HEAD_DIM


def draw(theme, results):
    codes, scales, exact = _page_bytes(results)
    canvas = Canvas(theme, 548, "A sequence in blocks of 64 tokens, and a page of one block")
    canvas.text(LEFT, 30, "A cache in blocks of 64 tokens", size=20, bold=True)
    _sequence(canvas)
    canvas.text(LEFT, 246, "One page: a block of one kv head", size=18, bold=True)
    canvas.text(LEFT, 270, f"{TOKENS} tokens x {HEAD_DIM} numbers, drawn to scale", "soft")
    top, width = 290, 240
    high = 200
    canvas.rect(LEFT, top, width, high, "exact")
    canvas.text(LEFT + width / 2, top + 96, "fp16", anchor="middle", bold=True)
    canvas.text(LEFT + width / 2, top + 120, f"{thousands(exact)} bytes", anchor="middle")
    x, part = LEFT + width + 24, width * codes / exact
    canvas.rect(x, top, part, high, "fill", "ours")
    for row in range(1, 16):
        canvas.path([(x, top + high * row / 16), (x + part, top + high * row / 16)])
    canvas.rect(x + part, top, max(width * scales / exact, 3), high, "ours", "ours")
    canvas.text(x + part + 20, top + 30, "sealed", bold=True)
    canvas.text(x + part + 20, top + 60, f"{thousands(codes)} bytes")
    canvas.text(x + part + 20, top + 82, "of codes: 4 bits")
    canvas.text(x + part + 20, top + 104, "per number")
    canvas.text(x + part + 20, top + 138, f"{thousands(scales)} bytes of")
    canvas.text(x + part + 20, top + 160, "scales: one fp16")
    canvas.text(x + part + 20, top + 182, "per token")
    canvas.text(LEFT, 526, f"The preset balanced: {SPEC.partition(':')[0]}.", "soft")
    return canvas


def _sequence(canvas):
    """The blocks of a sequence from its first token to the newest."""
    names = ("0-63", "64-127", "128-191", "...", "newest")
    width, top = (RIGHT - LEFT) / len(names), 92
    for number, name in enumerate(names):
        x = LEFT + width * number
        exact = number in (0, len(names) - 1)
        if name != "...":
            canvas.rect(
                x, top, width - 8, 56, "exact" if exact else "fill", "soft" if exact else "ours"
            )
            canvas.text(x + width / 2 - 4, top + 34, "fp16" if exact else "codes", anchor="middle")
        canvas.text(x + width / 2 - 4, top - 12, name, "soft", "middle")
    canvas.text(LEFT, top + 82, "The first block of a sequence stays fp16, and so do its", "soft")
    canvas.text(LEFT, top + 106, "newest tokens. kvant encodes them when they are older.", "soft")
