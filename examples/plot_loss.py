"""Draw the loss curves of one or more runs: ``python examples/plot_loss.py RUN_DIR [RUN_DIR ...]``."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_strategy.cli.figures import figure, style, theme


@dataclass(frozen=True)
class Curve:
    """Bits per byte by optimizer step."""

    label: str
    train: dict[int, float]
    validation: dict[int, float]


def read_curve(run_dir: Path) -> Curve:
    """The curves of the run whose ``metrics.jsonl`` lies in ``run_dir``."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    train = {row["step"]: row["bits_per_byte"] for row in rows if "bits_per_byte" in row}
    validation = {row["step"]: row["val_bits_per_byte"] for row in rows if "val_bits_per_byte" in row}
    return Curve(run_dir.name, train, validation)


def largest_difference(a: dict[int, float], b: dict[int, float]) -> float:
    """The largest difference of two curves over the steps that both have."""
    common = a.keys() & b.keys()
    if not common:
        raise ValueError("the two runs have no step in common")
    return max(abs(a[step] - b[step]) for step in common)


def title(curves: Sequence[Curve]) -> str:
    """The last validation of a single run; for several, how far the others are from the first."""
    if len(curves) == 1:
        validation = curves[0].validation
        return f"validation: {validation[max(validation)]:.3f} bits per byte" if validation else ""
    first, *others = curves
    trained = max(largest_difference(first.train, other.train) for other in others)
    validated = max(largest_difference(first.validation, other.validation) for other in others)
    names = " and ".join(curve.label for curve in curves)
    return f"{names}: at most {trained:.4f} bits per byte apart in training, {validated:.4f} in validation"


def plot(run_dirs: Sequence[Path], output: Path, *, dark: bool = False) -> str:
    """Draw the curves of all runs into one picture and return its title."""
    curves = [read_curve(run_dir) for run_dir in run_dirs]
    with figure(9, 5, dark=dark) as drawing:
        axes = drawing.subplots()
        for number, curve in enumerate(curves):
            color, line = theme(dark).series[number], ("-", "--", ":")[number % 3]  # where curves coincide, both show
            steps, bits = list(curve.train), list(curve.train.values())
            axes.plot(steps, bits, line, color=color, linewidth=1, label=f"{curve.label}, training")
            steps, bits = list(curve.validation), list(curve.validation.values())
            axes.plot(steps, bits, "o" + line, color=color, label=f"{curve.label}, validation")
        axes.set(xlabel="optimizer step", ylabel="bits per byte")
        axes.set_title(title(curves), loc="left", fontsize=10)
        style(axes, dark=dark)
        axes.legend()
        drawing.tight_layout()
        drawing.savefig(output)
    return title(curves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dirs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, help="default: loss.png in the first run's directory")
    parser.add_argument("--dark", action="store_true", help="for a dark page")
    args = parser.parse_args()
    output = args.output or args.run_dirs[0] / "loss.png"
    print(plot(args.run_dirs, output, dark=args.dark))
    print(f"loss curves: {output}")


if __name__ == "__main__":
    main()
