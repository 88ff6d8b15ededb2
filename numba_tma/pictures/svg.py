"""Just enough SVG for the pictures: shapes and text on a card, in colours that suit a light and a dark page.

Shapes name classes, not colours. The card is opaque, so that a picture is legible also where the page around it is
dark and the reader's system is not. Coordinates are pixels, rounded to a tenth: equal data gives equal files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

# class: what it sets, in a light surrounding and in a dark one
_STYLES = {
    "card": ("fill:#ffffff;stroke:#d0d7de", "fill:#0d1117;stroke:#30363d"),
    "ink": ("fill:#1f2328", "fill:#e6edf3"),
    "muted": ("fill:#59636e", "fill:#9198a1"),
    "frame": ("fill:none;stroke:#1f2328;stroke-width:1.6", "fill:none;stroke:#e6edf3;stroke-width:1.6"),
    "edge": ("fill:none;stroke:#ffffff;stroke-width:1", "fill:none;stroke:#0d1117;stroke-width:1"),
    "grid": ("fill:none;stroke:#d8dee4", "fill:none;stroke:#262c34"),
    "empty": ("fill:#f6f8fa;stroke:#d0d7de", "fill:#161b22;stroke:#30363d"),
    "limit": ("fill:none;stroke:#cf222e;stroke-width:1.4", "fill:none;stroke:#ff7b72;stroke-width:1.4"),
    "warning": ("fill:#cf222e", "fill:#ff7b72"),
    "threads": ("fill:#8c959f;stroke:#8c959f", "fill:#6e7681;stroke:#6e7681"),
    "cp_async": ("fill:#d4a72c;stroke:#d4a72c", "fill:#bb8009;stroke:#bb8009"),
    "tma": ("fill:#218bff;stroke:#218bff", "fill:#388bfd;stroke:#388bfd"),
    "peer": ("fill:#8250df;stroke:#8250df", "fill:#a371f7;stroke:#a371f7"),
    "compute": ("fill:#2da44e;stroke:#2da44e", "fill:#3fb950;stroke:#3fb950"),
    "c0": ("fill:#b6d7ff", "fill:#1f4b8f"),
    "c1": ("fill:#c5efcd", "fill:#1b6131"),
    "c2": ("fill:#ffddb3", "fill:#8a4d10"),
    "c3": ("fill:#fbcfe0", "fill:#8a2c57"),
    "c4": ("fill:#ddd0ff", "fill:#513d98"),
    "c5": ("fill:#bdeef0", "fill:#14646a"),
    "c6": ("fill:#fbef9f", "fill:#6b5c10"),
    "c7": ("fill:#dfe3e8", "fill:#4b535d"),
}
_TEXT = (
    'text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}'
    ".mono{font:11px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}"
    ".small{font-size:10px}.head{font-size:14px;font-weight:600}.bold{font-weight:600}"
)
_LINES = ".line{fill:none}.thick{stroke-width:2.4}.dashed{stroke-dasharray:5 4}"  # last: it overrides the colours' fill


class Picture:
    """A card of `width` × `height` pixels, with a title and a description for those who cannot see it."""

    def __init__(self, width: float, height: float, title: str, description: str) -> None:
        self.width, self.height = width, height
        self._title, self._description = title, description
        self._body: list[str] = []
        self._used: set[str] = {"card"}

    def rect(self, x: float, y: float, width: float, height: float, classes: str, radius: float = 0) -> None:
        """A rectangle; its corners are rounded by `radius`."""
        corner = f' rx="{_number(radius)}"' if radius else ""
        self._add("rect", classes, _places(x=x, y=y, width=width, height=height) + corner)

    def line(self, points: Sequence[tuple[float, float]], classes: str) -> None:
        """A line through the points."""
        path = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._add("polyline", classes, f'points="{path}"')

    def dot(self, x: float, y: float, radius: float, classes: str) -> None:
        """A disc."""
        self._add("circle", classes, _places(cx=x, cy=y, r=radius))

    def text(self, x: float, y: float, text: str, classes: str = "ink", anchor: str = "start", turn: int = 0) -> None:
        """Text whose base line is at `y`; `anchor` is start, middle or end; `turn` turns it, in degrees."""
        turned = f' transform="rotate({turn} {_number(x)} {_number(y)})"' if turn else ""
        anchored = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._add("text", classes, _places(x=x, y=y) + anchored + turned, escape(text))

    def legend(self, x: float, y: float, entries: Iterable[tuple[str, str]]) -> None:
        """Swatches with their words, side by side from (x, y)."""
        for classes, word in entries:
            self.rect(x, y - 9, 11, 11, classes, 2)
            self.text(x + 16, y, word, "muted")
            x += 34 + 6.6 * len(word)

    def svg(self) -> str:
        """The file's text."""
        light = "".join(f".{name}{{{_STYLES[name][0]}}}" for name in _STYLES if name in self._used)
        dark = "".join(f".{name}{{{_STYLES[name][1]}}}" for name in _STYLES if name in self._used)
        width, height = _number(self.width), _number(self.height)
        card = _places(x=0.5, y=0.5, width=self.width - 1, height=self.height - 1)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
                f'height="{height}" role="img" aria-label={quoteattr(self._title)}>',
                f"<title>{escape(self._title)}</title>",
                f"<desc>{escape(self._description)}</desc>",
                f"<style>{_TEXT}{light}@media (prefers-color-scheme:dark){{{dark}}}{_LINES}</style>",
                f'<rect class="card" {card} rx="8"/>',
                *self._body,
                "</svg>\n",
            ]
        )

    def _add(self, element: str, classes: str, attributes: str, content: str = "") -> None:
        self._used.update(set(classes.split()) & set(_STYLES))
        end = f">{content}</{element}>" if content else "/>"
        self._body.append(f'<{element} class="{classes}" {attributes}{end}')


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _places(**values: float) -> str:
    return " ".join(f'{name}="{_number(value)}"' for name, value in values.items())
