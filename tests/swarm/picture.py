"""Reports as pictures: bars of times, the floor as a mark on each."""

COLOURS = {"sepal": "#3b6ea5", "real": "#b8863b"}
NAMES = {"sepal": "Sepal", "real": "Petals"}
BAR, GAP, LEFT, WIDTH = 16, 26, 190, 760
THIN_BAR, SPACE = 9, 12


def draw(rows):
    """SVG text; one bar for each row, one scale for all."""
    most = max([row["step_ms"] for row in rows] + [row["floor_ms"] for row in rows] + [1])
    scale = (WIDTH - LEFT - 90) / most
    height = GAP * (len(rows) + 2)
    out = page(height, "One step of the Petals client, ms; the line is the floor")
    for i, row in enumerate(rows):
        y = GAP * (i + 1)
        label = f"{row['line']}, {row['servers']} servers, {NAMES[row['servers_kind']]}" + ("" if row["pushes"] else ", unpushed")
        out += [text(LEFT - 8, y + 13, label, "end"), *bar(y, BAR, scale, row["servers_kind"], row["step_ms"], row["floor_ms"])]
    return "\n".join(out + ["</svg>"]) + "\n"


def draw_lab(rows):
    """SVG text: for each figure a bar of each kind of servers, as multiples of the floor. A bar that is too long for the page ends in an
    arrow."""
    groups = {}
    for row in rows:
        if row["floor_ms"] > 0:
            groups.setdefault((row["profile"], row["servers"], row["device"], row["what"], row["clients"]), []).append(row)
    left, most, step = 300, 5.0, 2 * THIN_BAR + SPACE
    scale = (WIDTH - left - 70) / most
    out = page(step * len(groups) + 50, "Time as a multiple of the floor (line); Sepal blue, Petals ochre; ms at the bars")
    for i, ((profile, servers, device, what, clients), of) in enumerate(groups.items()):
        y = 34 + i * step
        people = "" if clients == 1 else f", {clients} clients"
        out.append(text(left - 8, y + 13, f"{profile}, {servers} × {device}, {what}{people}", "end"))
        for row in of:
            at = y + (THIN_BAR if row["servers_kind"] == "real" else 0)
            times = row["ms"] / row["floor_ms"]
            length = scale * min(times, most)
            out += [f'<rect x="{left}" y="{at}" width="{length:.1f}" height="{THIN_BAR - 1}" fill="{COLOURS[row["servers_kind"]]}"/>',
                    text(left + length + 5, at + 8, f"{row['ms']:.0f}" + (" →" if times > most else ""), size=9)]
    x = left + scale
    out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="28" y2="{34 + step * len(groups)}" stroke="#000000" stroke-width="1"/>')
    return "\n".join(out + ["</svg>"]) + "\n"


def page(height, title):
    return [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>', f'<text x="8" y="17" font-size="14">{title}</text>']


def text(x, y, words, anchor="start", size=12):
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" font-size="{size}">{words}</text>'


def bar(y, height, scale, kind, value, floor):
    length, mark = scale * value, LEFT + scale * floor
    return [f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{height}" fill="{COLOURS[kind]}"/>',
            text(LEFT + length + 6, y + 13, value),
            f'<line x1="{mark:.1f}" x2="{mark:.1f}" y1="{y - 3}" y2="{y + height + 3}" stroke="#000000" stroke-width="2"/>']
