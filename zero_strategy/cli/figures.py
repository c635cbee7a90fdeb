"""One style for every picture: the colours, fonts and grid of the report page, light or dark.

    with figure(8, 4, dark=False) as drawing:
        panel = drawing.subplots()
        ...
        style(panel)
        drawing.savefig("picture.png")

Pictures need matplotlib (`pip install matplotlib`), which is imported when one is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

DPI = 120


@dataclass(frozen=True)
class Theme:
    """Colours by their use; those of `page/report.css`.

    Attributes:
        page: Behind everything.
        ink: Of titles and values.
        soft: Of labels and notes.
        line: Of axes.
        grid: Of grid lines.
        alarm: Of limits, and of what exceeds them.
        idle: Of time that is not used.
        series: Of lines and of kinds, in order; neighbours are told apart by people who see no red or green, too.
    """

    page: str
    ink: str
    soft: str
    line: str
    grid: str
    alarm: str
    idle: str
    series: tuple[str, ...]


LIGHT = Theme(
    "#ffffff", "#1b2430", "#5b6675", "#dfe4ea", "#edf0f4", "#c01830", "#dfe4ea",
    ("#4c84e0", "#2ba38d", "#f0913a", "#8457c8", "#64b8d8", "#b5452f", "#f5c04a", "#d96fa8", "#97a86a", "#b18ae0",
     "#8d7358", "#3f5f8f", "#8b95a3", "#2f7f4f"),
)  # fmt: skip
DARK = Theme(
    "#1a2029", "#e7ecf2", "#9aa7b7", "#2e3744", "#252d38", "#ff7a85", "#3a4452",
    ("#5f97f2", "#38b8a0", "#f5a253", "#9b72dc", "#76c6e4", "#d06450", "#f3ca69", "#e486b9", "#a9ba7c", "#bd9cea",
     "#ab9075", "#7f9fd0", "#768192", "#63b77f"),
)  # fmt: skip


def theme(dark: bool) -> Theme:
    """The colours of a light or a dark picture."""
    return DARK if dark else LIGHT


@contextmanager
def figure(width: float, height: float, *, dark: bool = False, option: str = "a picture") -> Iterator[Any]:
    """A matplotlib figure in the style; draw and save it inside of the block. It needs no display.

    Args:
        width, height: Inches, of 120 pixels each.
        dark: Colours for a dark page.
        option: The name of what asks for the picture, for the error.

    Raises:
        ValueError: If matplotlib is missing.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"{option} needs matplotlib: pip install matplotlib") from error
    colors = theme(dark)
    settings: Any = {
        "figure.facecolor": colors.page, "axes.facecolor": colors.page, "savefig.facecolor": colors.page,
        "text.color": colors.ink, "axes.titlecolor": colors.ink, "axes.labelcolor": colors.soft,
        "axes.edgecolor": colors.line, "xtick.color": colors.line, "ytick.color": colors.line,
        "xtick.labelcolor": colors.soft, "ytick.labelcolor": colors.soft, "legend.labelcolor": colors.soft,
        "font.size": 9, "axes.titlesize": 11, "figure.titlesize": 13, "legend.frameon": False,
        "svg.fonttype": "none",  # text that can be searched and edited
    }  # fmt: skip
    with rc_context(settings):
        drawing = Figure(figsize=(width, height), dpi=DPI)
        FigureCanvasAgg(drawing)
        yield drawing


def style(panel: Any, *, dark: bool = False, grid: str = "y") -> None:
    """Axes without a frame, over a pale grid.

    Args:
        panel: A matplotlib `Axes`.
        dark: As of its figure.
        grid: The axis whose lines are drawn: x, y, both, or "" for none.
    """
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(left=False, bottom=False)
    panel.set_axisbelow(True)
    if grid:
        panel.grid(axis=grid, color=theme(dark).grid, linewidth=0.8)
