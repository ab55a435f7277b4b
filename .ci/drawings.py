"""Write docs/drawings/*.svg: boxes, arrows and text on a grid, `python .ci/drawings.py docs/drawings`."""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

COLOURS = {  # fill and line
    "grey": ("#f2f3f5", "#8a919c"), "green": ("#e3f4e6", "#2e8b4a"), "blue": ("#e4edfb", "#3d6fc4"),
    "red": ("#fbe7e4", "#c4503d"), "white": ("#ffffff", "#8a919c"),
}  # fmt: skip
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" font-family="system-ui, sans-serif" font-size="13">
<title>{title}</title>
<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">
<path d="M0 0 8 4 0 8z" fill="#555"/></marker></defs>
<rect width="{w}" height="{h}" fill="#fff"/>
"""


class Drawing:
    """An SVG file that is written line by line."""

    def __init__(self, title: str, w: int, h: int) -> None:
        self.lines = [HEAD.format(title=escape(title), w=w, h=h)]

    def box(
        self, x: int, y: int, w: int, h: int, text: str = "", colour: str = "grey", dash: bool = False, top: bool = False
    ) -> None:
        """A box with its text in the middle, or along its top; lines of text are separated by |."""
        fill, line = COLOURS[colour]
        style = ' stroke-dasharray="5 4"' if dash else ""
        self.lines.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="5" fill="{fill}" stroke="{line}"{style}/>')
        rows = text.split("|") if text else []
        start = y + 17 if top else y + h / 2 + 5 - 8 * (len(rows) - 1)
        for row, each in enumerate(rows):
            self.text(x + (8 if top else w / 2), start + 16 * row, each, middle=not top)

    def text(
        self, x: float, y: float, text: str, middle: bool = False, colour: str = "#222", code: bool = False, size: int = 13
    ) -> None:
        """One line of text."""
        style = ' text-anchor="middle"' if middle else ""
        style += ' font-family="ui-monospace, monospace"' if code else ""
        style += f' fill="{colour}" font-size="{size}" xml:space="preserve"'
        self.lines.append(f'<text x="{x:g}" y="{y:g}"{style}>{escape(text)}</text>')

    def arrow(self, *points: tuple[int, int], colour: str = "#555", dash: bool = False) -> None:
        """An arrow through points."""
        path = " ".join(f"{x},{y}" for x, y in points)
        style = ' stroke-dasharray="5 4"' if dash else ""
        style += f' stroke="{colour}" stroke-width="1.6" marker-end="url(#a)"'
        self.lines.append(f'<polyline points="{path}" fill="none"{style}/>')

    def __str__(self) -> str:
        return "\n".join([*self.lines, "</svg>", ""])


def readme() -> Drawing:
    """A pass, the traced graph, and the graph that it becomes."""
    d = Drawing("A pass matches layers of a traced model; apply puts its block beside each", 860, 210)
    d.box(10, 30, 220, 150, "", "white")
    d.text(20, 22, "a pass: passes/lora.yaml", colour="#555")
    rule = "rules:|- match:|    path: [to_q, to_k]|    module: Linear|  use: fxplug.blocks:Lora|  place: after"
    for row, line in enumerate(rule.split("|")):
        d.text(22, 56 + 21 * row, line, code=True, size=12)
    d.text(262, 22, "trace: a graph, torch.equal to the model", colour="#555")
    graph(d, 270, False)
    d.text(578, 22, "apply: a new graph on the same weights", colour="#555")
    graph(d, 580, True)
    d.arrow((232, 105), (262, 105))
    d.arrow((530, 105), (568, 105))
    return d


def graph(d: Drawing, x: int, new: bool) -> None:
    """norm, two layers, attention; with LoRA beside the layers."""
    d.box(x, 90, 50, 30, "norm")
    for side, name in ((-1, "to_q"), (1, "to_k")):
        layer, block = 105 + side * (57 if new else 45), 105 + side * 19
        d.box(x + 85, layer - 15, 55, 30, name)
        d.arrow((x + 50, 105), (x + 85, layer))
        if new:
            d.box(x + 110, block - 14, 50, 28, "Lora", "green")
            d.arrow((x + 50, 105), (x + 110, block), colour="#2e8b4a")
            d.arrow((x + 140, layer), (x + 150, layer), (x + 150, block + side * 14), colour="#2e8b4a")
            d.arrow((x + 160, block), (x + 190, 105), colour="#2e8b4a")
        else:
            d.arrow((x + 140, layer), (x + 180, 105))
    d.box(x + (190 if new else 180), 90, 75, 30, "attention")


def regions() -> Drawing:
    """Regions in each other, addressed by their paths, and the ports at their edges."""
    d = Drawing("Regions and ports", 860, 260)
    d.box(10, 20, 840, 225, "the model: the empty path", "white", top=True)
    d.box(110, 55, 640, 175, "blocks.3: one call of one submodule", "grey", top=True)
    d.box(200, 95, 360, 115, "blocks.3.attn", "blue", top=True)
    d.box(230, 135, 90, 40, "qkv")
    d.box(350, 135, 90, 40, "attention")
    d.box(470, 135, 70, 40, "proj")
    d.box(640, 135, 80, 40, "mlp")
    for a, b in ((30, 230), (320, 350), (440, 470), (540, 640), (720, 830)):
        d.arrow((a, 155), (b, 155))
    for x, y, name in ((16, 148, ":in.x"), (118, 148, "blocks.3:in"), (562, 148, "...attn"), (756, 148, "blocks.3")):
        d.text(x, y, name, code=True, size=11, colour="#c4503d")
    d.text(225, 195, "blocks.3.attn.qkv:param.weight", code=True, size=11, colour="#c4503d")
    return d


def sites() -> Drawing:
    """A rule's pattern, and the sites that it finds."""
    d = Drawing("A pass finds sites", 860, 190)
    d.box(10, 60, 240, 60, "at: blocks.{i}.attn.qkv|module: [Linear]", "green")
    for i in range(3):
        y = 15 + 58 * i
        d.box(330, y, 372, 46, "", "grey")
        d.box(345, y + 8, 120, 30, f"blocks.{i}.attn.qkv", "blue")
        d.text(480, y + 21, f"{{i}} = {i}   [2, 16, 64] -> [2, 16, 192]", size=12)
        d.text(480, y + 37, f"ports x: blocks.{i}.attn:in, y: the result", size=11, colour="#555")
        d.arrow((250, 90), (330, y + 23), colour="#2e8b4a")
    d.text(712, 75, "3 sites, counted")
    d.text(712, 93, "before any edit.")
    d.text(712, 111, "None is an error.")
    return d


def places() -> Drawing:
    """The four places of a block."""
    d = Drawing("The four places of a block", 860, 150)
    for n, name in enumerate(("after", "before", "replace", "param")):
        x = 15 + 212 * n
        d.text(x + 4, 22, f"place: {name}", code=True)
        if name == "after":
            d.box(x + 30, 50, 60, 30, "layer")
            d.box(x + 115, 50, 60, 30, "block", "green")
            d.arrow((x, 65), (x + 30, 65))
            d.arrow((x + 90, 65), (x + 115, 65))
            d.arrow((x + 12, 65), (x + 12, 100), (x + 145, 100), (x + 145, 80))
            d.arrow((x + 175, 65), (x + 200, 65))
        elif name == "before":
            d.box(x + 30, 50, 60, 30, "block", "green")
            d.box(x + 115, 50, 60, 30, "layer")
            for a, b in ((0, 30), (90, 115), (175, 200)):
                d.arrow((x + a, 65), (x + b, 65))
        elif name == "replace":
            d.box(x + 70, 50, 60, 30, "block", "green")
            d.box(x + 70, 95, 60, 30, "layer", "red", dash=True)
            d.arrow((x, 65), (x + 70, 65))
            d.arrow((x + 130, 65), (x + 200, 65))
        else:
            d.box(x + 70, 50, 60, 30, "layer")
            d.box(x + 70, 100, 60, 30, "block", "green")
            d.text(x + 4, 120, "weight")
            d.arrow((x + 52, 115), (x + 70, 115))
            d.arrow((x + 100, 100), (x + 100, 80))
            d.arrow((x, 65), (x + 70, 65))
            d.arrow((x + 130, 65), (x + 200, 65))
    return d


def slots() -> Drawing:
    """A bank of slots beside a layer, and the gates that choose."""
    d = Drawing("Slots beside a layer", 860, 190)
    d.box(90, 75, 90, 36, "layer")
    d.arrow((20, 93), (90, 93))
    d.box(260, 20, 250, 150, "a bank: (slots, rank, features)", "green", top=True)
    for i, name in enumerate(("ink", "film", "empty", "empty")):
        d.box(280, 50 + 28 * i, 90, 22, name, "white" if name == "empty" else "blue", dash=name == "empty")
        d.text(385, 66 + 28 * i, f"gate {('0.8', '0.3', '0', '0')[i]}", code=True, size=12)
    d.box(590, 77, 40, 32, "+")
    d.arrow((180, 93), (220, 93), (220, 182), (610, 182), (610, 109))
    d.arrow((60, 93), (60, 40), (260, 40))
    d.arrow((510, 93), (590, 93))
    d.arrow((630, 93), (680, 93))
    d.text(690, 70, "use, load and unload")
    d.text(690, 88, "write tensors: the graph")
    d.text(690, 106, "stays, and nothing is")
    d.text(690, 124, "compiled anew.")
    return d


def guards() -> Drawing:
    """What a decision in Python becomes in the graph."""
    d = Drawing("A guard", 860, 150)
    d.box(10, 30, 300, 90, "", "white")
    d.text(20, 22, "forward", colour="#555")
    for row, line in enumerate(["if x.shape[1] > 77:", "    x = self.pool(x)", "return self.proj(x)"]):
        d.text(24, 58 + 22 * row, line, code=True, size=12)
    d.arrow((312, 75), (350, 75))
    d.text(360, 22, "the graph of a call with 16 tokens", colour="#555")
    d.box(360, 35, 90, 30, "x.size(1)")
    d.box(480, 35, 110, 30, "> 77: False", "red")
    d.box(480, 85, 110, 30, "proj")
    d.arrow((450, 50), (480, 50))
    d.arrow((360, 100), (480, 100))
    d.arrow((590, 100), (640, 100))
    d.text(610, 46, "With 99 tokens Python would take the")
    d.text(610, 63, "other branch: GuardError, with its line.")
    return d


if __name__ == "__main__":
    for make in (readme, regions, sites, places, slots, guards):
        Path(sys.argv[1], f"{make.__name__}.svg").write_text(str(make()), "utf-8")
