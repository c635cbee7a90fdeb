"""Of settings that a running engine can change the quickest stays, on all ranks alike, and no bit changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.auto.ranks import tried
from tests.launcher import Launcher
from zero_strategy.auto.trial import MEASURED, MOST, STEPS, WARM, Trial, trial_for
from zero_strategy.config import load_config

CHOICES: list[dict[str, Any]] = [
    {"prefetch": 1, "reshard_after_forward": True},
    {"prefetch": 1, "reshard_after_forward": False},
    {"prefetch": 2, "reshard_after_forward": True},
]


@dataclass
class Gathers:
    prefetch: int = 1
    reshard_after_forward: bool = True


def run(seconds: list[float], others: list[float] | None = None, choices: list[dict[str, Any]] = CHOICES) -> Any:
    """(gathers, config, settings in effect in each step) of steps that take these times with each choice.

    The first step of a choice takes ten times as long. `others`: times of another rank.
    """
    gathers, config, now = Gathers(), load_config(stage=3), 0.0
    exchange = (lambda own: [own]) if others is None else (lambda own: [own, others])
    trial = Trial(gathers, choices, config, exchange, 1, lambda: now)
    seen = []
    for number in range(len(choices)):
        for step in range(WARM + STEPS):
            seen.append((gathers.prefetch, gathers.reshard_after_forward))
            now += seconds[number] * (10 if step < WARM else 1)
            trial.step_over()
    assert trial.over
    return gathers, config, seen


def test_each_choice_has_its_steps() -> None:
    _, _, seen = run([1.0, 1.0, 1.0])
    assert seen == [(c["prefetch"], c["reshard_after_forward"]) for c in CHOICES for _ in range(WARM + STEPS)]
    assert len(seen) <= 10


@pytest.mark.parametrize(
    ("seconds", "others", "taken"),
    [
        ([1.0, 0.9, 0.8], None, 2),
        ([1.0, 0.99, 1.5], None, 0),  # not for one per cent
        ([1.0, 0.5, 0.6], [1.0, 0.9, 0.7], 2),  # the slowest rank counts
        ([0.5, 0.5, 0.5], [1.0, 0.9, 1.2], 1),
    ],
)
def test_the_quickest_of_the_slowest_rank_stays(seconds: list[float], others: list[float] | None, taken: int) -> None:
    gathers, config, _ = run(seconds, others)
    assert vars(gathers) == CHOICES[taken]
    changed = {name for name, value in CHOICES[taken].items() if value != CHOICES[0][name]}
    for name in CHOICES[0]:
        assert (config.origin_of(name) == MEASURED) == (name in changed) and getattr(config, name) == getattr(
            gathers, name
        )


def test_no_more_than_a_few_are_tried() -> None:
    choices = [{"prefetch": number} for number in range(5)]
    trial = Trial(Gathers(), choices, load_config(stage=3), lambda own: [own], 0)
    for _ in range((WARM + STEPS) * MOST):
        assert not trial.over
        trial.step_over()
    assert trial.over


def test_nothing_is_tried_where_nothing_was_chosen() -> None:
    assert trial_for(load_config(stage=3), Gathers(), lambda own: [own], 0) is None


def test_ranks_take_the_same_and_bits_stay(ranks: Launcher) -> None:
    found = ranks(2)(tried, {"stage": 3, "auto": {"enabled": True}}, 12)
    (digest, settings, count), other = found[0], found[1]
    assert found[0] == other and count >= 2
    assert settings["prefetch"] in (1, 2)  # of those that fit; how long units are kept is a matter of this machine
    plain = ranks(2)(tried, {"stage": 3, **settings}, 12)[0]
    assert plain == (digest, settings, 0)
