"""Curves as an SVG file, in the colours of the project's other charts."""

import math

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 16, 44


def ticks(low, high, about=6):
    """Round numbers from `low` to `high`."""
    raw = (high - low) / about
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    first = math.ceil(low / step)
    return [step * i for i in range(first, int(high / step) + 1)]


def svg(series, x_name, y_name, colours=("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")):
    """Series of [x, y] by name."""
    points = [point for line in series.values() for point in line]
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low_y, high_y = min(y for _, y in points), max(y for _, y in points)
    high_x, high_y = max(high_x, low_x + 1), max(high_y, low_y + 1e-6)

    def place(x, y):
        across = LEFT + (x - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)
        down = TOP + (high_y - y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)
        return f"{across:.1f}", f"{down:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for y in ticks(low_y, high_y):
        _, down = place(low_x, y)
        parts.append(f'<path d="M{LEFT} {down}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down}" dy="4" text-anchor="end">{y:g}</text>')
    for x in ticks(low_x, high_x):
        across, _ = place(x, low_y)
        parts.append(f'<text x="{across}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{x_name}</text>')
    parts.append(f'<text x="14" y="{HEIGHT / 2}" transform="rotate(-90 14 {HEIGHT / 2})" text-anchor="middle">{y_name}</text>')
    for number, (name, line) in enumerate(series.items()):
        colour = colours[number % len(colours)]
        path = "L".join(" ".join(place(x, y)) for x, y in line)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
        down = TOP + 16 + 17 * number
        parts.append(f'<path d="M{WIDTH - 220} {down - 4}h22" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{WIDTH - 192}" y="{down}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])
