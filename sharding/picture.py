"""A picture of a partition: layers, stages and sharing arrows, crossings in red."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from dsv41_jax.config import ModelConfig
from dsv41_jax.layer_plan import AttentionMode, LayerSpec, layer_plan
from sharding.dependencies import Dependency
from sharding.memory import StageBytes
from sharding.memory_picture import bars_height, draw_bars
from sharding.stage_plan import StagePlan

STEP = 30  # pixels from layer to layer
LEFT, RIGHT, TOP = 130, 24, 92
BOX = 24
MIN_WIDTH = 720  # of the legend and the title
LANE = 46  # height of one kind's lane
LANES_TOP = TOP + BOX + 40
RED = "#d32f2f"
LANES = {
    "kv": ("#1565c0", "compressed KV"),
    "index_k": ("#6a1b9a", "index keys"),
    "index": ("#2e7d32", "top-k sets"),
    "candidate": ("#8d6e00", "candidates"),
}
FILLS = {
    AttentionMode.WINDOW: ("#eceff1", "window only"),
    AttentionMode.FULL: ("#90caf9", "KV and index source"),
    AttentionMode.REINDEX: ("#a5d6a7", "index source"),
    AttentionMode.REUSE: ("#ffffff", "reads from others"),
}


def draw(
    config: ModelConfig,
    plan: StagePlan,
    memory: Sequence[StageBytes] = (),
    usable: int | None = None,
) -> str:
    """The partition as an SVG document.

    Args:
      config: the model.
      plan: its stages.
      memory: bytes of a device by stage; drawn as bars where they are known.
      usable: bytes that a device has.
    """
    specs = layer_plan(config)
    width = max(LEFT + plan.num_layers * STEP + RIGHT, MIN_WIDTH)
    lanes_end = LANES_TOP + len(LANES) * LANE
    height = lanes_end + 84 + (bars_height(len(memory)) if memory else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        _arrowheads(),
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(12, 24, _title(plan), size=15, anchor="start", weight="bold"),
    ]
    parts += _stages(plan, lanes_end)
    parts += [
        f'<line x1="{_x(layer)}" y1="{TOP + BOX}" x2="{_x(layer)}" y2="{lanes_end - 8}" '
        'stroke="#e4e7e9"/>'
        for layer in range(plan.num_layers)
    ]
    parts += [_layer(spec) for spec in specs]
    for lane, kind in enumerate(LANES):
        found = [dependency for dependency in plan.dependencies if dependency.kind == kind]
        parts += _lane(plan, kind, LANES_TOP + lane * LANE, found)
    parts += _boundaries(plan, lanes_end)
    parts += _legend(lanes_end + 52)
    if memory:
        parts += draw_bars(memory, usable, lanes_end + 84, width)
    return "\n".join([*parts, "</svg>", ""])


def _title(plan: StagePlan) -> str:
    crossings = len(plan.crossings)
    verdict = "nothing crosses"
    if crossings:
        verdict = "1 crossing" if crossings == 1 else f"{crossings} crossings"
        verdict += ", relayed" if plan.relay else ": not legal without the relay"
    counts = ", ".join(map(str, plan.counts))
    return f"{plan.num_layers} layers in stages of {counts}: {verdict}"


def _x(layer: float) -> float:
    return LEFT + (layer + 0.5) * STEP


def _stages(plan: StagePlan, lanes_end: int) -> list[str]:
    parts = []
    for stage in plan.stages:
        left, span = LEFT + stage.layers.start * STEP, len(stage.layers) * STEP
        first, last = stage.layers.start, stage.layers.stop - 1
        middle = left + span / 2
        fill = "#f4f6f8" if stage.stage % 2 == 0 else "#fdf6ec"
        label = f"stage {stage.stage}" if span > 2 * STEP else str(stage.stage)
        layers = str(first) if first == last else f"{first}-{last}"
        parts += [
            f'<rect x="{left + 1}" y="38" width="{span - 2}" height="{lanes_end - 38}" '
            f'rx="6" fill="{fill}" stroke="#b0bec5"/>',
            _text(middle, 56, label, size=12, weight="bold"),
            _text(middle, 70, f"layers {layers}" if span > 2 * STEP else layers, size=10),
        ]
    return parts


def _layer(spec: LayerSpec) -> str:
    x = _x(spec.layer)
    fill = FILLS[spec.mode][0]
    box = (
        f'<rect x="{x - BOX / 2}" y="{TOP}" width="{BOX}" height="{BOX}" rx="4" fill="{fill}" '
        f'stroke="#455a64"/>{_text(x, TOP + 16, str(spec.layer))}'
    )
    marks = ["E"] if spec.engram is not None else []
    marks += ["D"] if spec.draft_target else []
    return box + _text(x, TOP + BOX + 13, " ".join(marks), size=10, fill="#ad1457")


def _lane(plan: StagePlan, kind: str, top: int, found: list[Dependency]) -> list[str]:
    """One bus per source, with an arrow down to every layer that reads it."""
    color, name = LANES[kind]
    bus, node = top + 8, top + 30
    parts = [_text(12, top + 24, name, anchor="start", fill=color, weight="bold")]
    for source in sorted({dependency.source for dependency in found}):
        reads = [dependency for dependency in found if dependency.source == source]
        local = [dependency.consumer for dependency in reads if not dependency.crosses]
        crossing = [dependency.consumer for dependency in reads if dependency.crosses]
        edge = LEFT + plan.stages[reads[0].source_stage].layers.stop * STEP
        end = edge if crossing else _x(max(local))
        parts.append(_path(f"M{_x(source)},{node} V{bus} H{end}", color))
        if crossing:
            parts.append(_path(f"M{edge},{bus} H{_x(max(crossing))}", RED))
        for layers, stroke, head in ((local, color, kind), (crossing, RED, "crossing")):
            parts += [
                _path(f"M{_x(layer)},{bus} V{node - 2}", stroke, head=head) for layer in layers
            ]
        parts.append(f'<circle cx="{_x(source)}" cy="{node}" r="4" fill="{color}"/>')
    return parts


def _boundaries(plan: StagePlan, lanes_end: int) -> list[str]:
    parts = []
    for boundary in plan.boundaries:
        x = LEFT + boundary.cut * STEP
        parts.append(
            f'<line x1="{x}" y1="38" x2="{x}" y2="{lanes_end + 4}" stroke="#37474f" '
            'stroke-dasharray="4 3"/>'
        )
        if boundary.relay:
            text = f"relay {boundary.relay_bytes_per_token} B"
            parts.append(_text(x, lanes_end + 18, text, size=10, fill=RED))
    return parts


def _legend(y: int) -> list[str]:
    parts, x = [], 12
    for fill, name in FILLS.values():
        parts.append(
            f'<rect x="{x}" y="{y - 11}" width="14" height="14" rx="3" fill="{fill}" '
            'stroke="#455a64"/>'
        )
        parts.append(_text(x + 20, y, name, anchor="start"))
        x += 34 + 7 * len(name)
    parts.append(_path(f"M{x},{y - 4} H{x + 26}", RED, head="crossing"))
    parts.append(_text(x + 36, y, "crosses stages", anchor="start"))
    parts.append(
        _text(12, y + 20, "E: Engram table   D: the draft reads its input", anchor="start")
    )
    return parts


def _arrowheads() -> str:
    colors = {**{kind: color for kind, (color, _) in LANES.items()}, "crossing": RED}
    markers = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{color}"/></marker>'
        for name, color in colors.items()
    )
    return f"<defs>{markers}</defs>"


def _path(d: str, stroke: str, *, head: str = "") -> str:
    arrow = f' marker-end="url(#{head})"' if head else ""
    return f'<path d="{d}" fill="none" stroke="{stroke}" stroke-width="1.6"{arrow}/>'


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 11,
    anchor: str = "middle",
    fill: str = "#263238",
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
