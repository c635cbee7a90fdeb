"""What `verify` found, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zero_strategy.diagnostics.verify_compare import Difference


@dataclass(frozen=True)
class PhaseCount:
    """How many tensors of a phase were compared over all steps.

    Attributes:
        phase: Its name.
        compared: How many.
        equal: How many had the same bits.
        worst: The largest difference among the others, as a multiple of what re-ordered summation explains.
    """

    phase: str
    compared: int
    equal: int
    worst: float | None = None


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of `verify`.

    Attributes:
        stage: The ZeRO stage.
        ranks: How many trained.
        steps: How many steps were compared.
        tolerance: Multiple of what re-ordered summation explains that was accepted; 0: bits were compared.
        reason: Why bits were not, "" if they were.
        phases: What was compared.
        differences: What differs in the first phase of the first step where anything does; empty if nothing does.
        pipeline_stages: Ranks that a copy of the model was divided among.
    """

    stage: int
    ranks: int
    steps: int
    tolerance: float
    reason: str
    phases: list[PhaseCount] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    pipeline_stages: int = 1

    @property
    def passed(self) -> bool:
        """Whether nothing differs too much."""
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The first tensor that differs."""
        return self.differences[0] if self.differences else None

    def raise_if_failed(self) -> None:
        """Raise if something differs.

        Raises:
            AssertionError: With the first difference.
        """
        if self.differences:
            raise AssertionError(str(self.differences[0]))

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        return {
            "passed": self.passed,
            "stage": self.stage,
            "pipeline_stages": self.pipeline_stages,
            "ranks": self.ranks,
            "steps": self.steps,
            "tolerance": self.tolerance,
            "reason": self.reason,
            "phases": [vars(phase) for phase in self.phases],
            "differences": [difference.as_dict() for difference in self.differences],
        }

    def __str__(self) -> str:
        how = "bit by bit" if not self.tolerance else f"within {self.tolerance:g} x what re-ordered summation explains"
        stages = f", {self.pipeline_stages} pipeline stages," if self.pipeline_stages > 1 else ""
        lines = [f"stage {self.stage} on {self.ranks} rank(s){stages} against plain torch in one process, {how}"]
        if self.reason:
            lines.append(f"(not by bits: {self.reason})")
        lines += ["", f"{'phase':<18}{'compared':>10}{'equal bits':>12}{'largest / re-ordering':>23}"]
        for phase in self.phases:
            worst = "-" if phase.worst is None else f"{phase.worst:.3g}"
            lines.append(f"{phase.phase:<18}{phase.compared:>10}{phase.equal:>12}{worst:>23}")
        lines.append("")
        if self.passed:
            lines.append(f"PASSED: {self.steps} step(s)")
        else:
            lines.append(f"FAILED: the first that differs is {self.differences[0]}")
            lines += [f"  also {difference}" for difference in self.differences[1:]]
        return "\n".join(lines)
