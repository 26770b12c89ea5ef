"""Bars of what a device of each stage holds, for the picture of a partition."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from sharding.fit import GIB, LABELS, component_bytes, gib
from sharding.memory import StageBytes

ROW = 26  # pixels from bar to bar
BAR = 16
LEFT, RIGHT = 130, 110
COLORS = dict(
    zip(
        LABELS.values(),
        "#1565c0 #64b5f6 #0277bd #2e7d32 #8d6e00 #00838f #90a4ae #6a1b9a #ad1457 #f06292 #4e342e "
        "#ff8f00 #cfd8dc".split(),
        strict=True,
    )
)


def bars_height(stages: int) -> int:
    """Pixels that `draw_bars` needs."""
    return 64 + ROW * stages + 18 * (-(-len(COLORS) // 4))


def draw_bars(stages: Sequence[StageBytes], usable: int | None, top: int, width: int) -> list[str]:
    """SVG elements: a bar per stage, and a red line where a device ends.

    Args:
      stages: bytes by stage.
      usable: bytes of a device, or None where none is named.
      top: where to begin.
      width: of the picture.
    """
    longest = max([*(stage.total for stage in stages), usable or 0])
    scale = (width - LEFT - RIGHT) / longest
    parts = [_text(12, top + 16, "Memory of each device", weight="bold")]
    for i, stage in enumerate(stages):
        y, x = top + 30 + i * ROW, float(LEFT)
        parts.append(_text(12, y + 12, f"stage {i}"))
        for label, size in component_bytes(stage).items():
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{size * scale:.1f}" height="{BAR}" '
                f'fill="{COLORS[label]}"><title>{label}: {gib(size)}</title></rect>'
            )
            x += size * scale
        short = usable is not None and stage.total > usable
        parts.append(_text(x + 6, y + 12, gib(stage.total), fill="#d32f2f" if short else "#263238"))
    bottom = top + 30 + len(stages) * ROW
    if usable is not None:
        x = LEFT + usable * scale
        parts.append(
            f'<line x1="{x:.1f}" y1="{top + 24}" x2="{x:.1f}" y2="{bottom}" stroke="#d32f2f" '
            'stroke-dasharray="4 3"/>'
        )
        parts.append(_text(x - 120, top + 18, f"device: {usable / GIB:.1f} GiB", fill="#d32f2f"))
    for i, (label, color) in enumerate(COLORS.items()):
        x, y = 12 + i % 4 * 170, bottom + 16 + i // 4 * 18
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{color}"/>')
        parts.append(_text(x + 16, y, label))
    return parts


def _text(x: float, y: float, text: str, *, fill: str = "#263238", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" font-size="11" fill="{fill}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )
