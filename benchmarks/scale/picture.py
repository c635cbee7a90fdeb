"""The predictions as a picture: utilization and seconds of a step by number of ranks, a line for each layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.scale.steps import Prediction


def draw(predictions: Sequence[Prediction], title: str, memory_bytes: float, path: Path) -> None:
    """Write a PNG. What does not fit into memory is drawn hollow.

    Raises:
        ValueError: If matplotlib is missing, or the name does not end in .png.
        OSError: If the file cannot be written.
    """
    if path.suffix != ".png":
        raise ValueError(f"--plot {path}: the name must end in .png")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install zero-strategy[bench]") from error
    figure: Any = Figure(figsize=(11, 4.5), dpi=120)
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    kinds = list(dict.fromkeys(kind_of(one) for one in predictions))
    for color, kind in enumerate(kinds):
        own = [one for one in predictions if kind_of(one) == kind]
        ranks = [one.layout.ranks for one in own]
        for panel, values in zip(panels, ([100 * o.utilization for o in own], [o.step for o in own]), strict=True):
            panel.plot(ranks, values, color=f"C{color}", label=kind)
            for one, value in zip(own, values, strict=True):
                fits = one.state_bytes <= memory_bytes
                face = f"C{color}" if fits else "white"
                panel.plot(one.layout.ranks, value, "o", color=f"C{color}", markerfacecolor=face)
    ticks = sorted({one.layout.ranks for one in predictions})
    for panel, label in zip(panels, ("utilization of the peak, %", "seconds of a step"), strict=True):
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [str(tick) for tick in ticks], rotation=45)
        panel.set(xlabel="ranks", ylabel=label, ylim=(0, None))
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path)


def kind_of(prediction: Prediction) -> str:
    """The layout without its numbers."""
    return prediction.layout.name.split()[0]
