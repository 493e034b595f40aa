"""The report as a picture: bars of step times, the floor as a mark on each."""

COLOURS = {"sepal": "#3b6ea5", "real": "#b8863b"}
NAMES = {"sepal": "Sepal", "real": "Petals"}
BAR, GAP, LEFT, WIDTH = 16, 26, 190, 760


def draw(rows):
    """SVG text; one bar for each row, one scale for all."""
    most = max([row["step_ms"] for row in rows] + [row["floor_ms"] for row in rows] + [1])
    scale = (WIDTH - LEFT - 90) / most
    height = GAP * (len(rows) + 2)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
           f'<text x="8" y="17" font-size="14">One step of the Petals client, ms; the line is the floor</text>']
    for i, row in enumerate(rows):
        y = GAP * (i + 1)
        label = f"{row['line']}, {row['servers']} servers, {NAMES[row['servers_kind']]}" + ("" if row["pushes"] else ", unpushed")
        length, floor = scale * row["step_ms"], LEFT + scale * row["floor_ms"]
        out += [f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{label}</text>',
                f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{COLOURS[row["servers_kind"]]}"/>',
                f'<text x="{LEFT + length + 6:.1f}" y="{y + 13}">{row["step_ms"]}</text>',
                f'<line x1="{floor:.1f}" x2="{floor:.1f}" y1="{y - 3}" y2="{y + BAR + 3}" stroke="#000000" stroke-width="2"/>']
    return "\n".join(out + ["</svg>"]) + "\n"
