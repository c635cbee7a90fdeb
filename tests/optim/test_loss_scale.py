"""The loss scale against its rule, written out: growth, fall, hysteresis."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_strategy.config import LossScaleConfig
from zero_strategy.optim import LossScaler


def by_the_rule(
    steps: list[bool], window: int, hysteresis: int, delay: int = 0, consecutive: bool = False
) -> list[float]:
    """Scales after each step: of the overflows since the last growth all but the first `hysteresis - 1` halve it.

    The first `delay` good steps, and those after each overflow, do not count toward the growth. `consecutive`: of the
    overflows in a row instead.
    """
    scale, good, tolerated, scales = 1024.0, -delay, hysteresis - 1, []
    for finite in steps:
        if not finite:
            good = -delay
            if tolerated:
                tolerated -= 1
            else:
                scale /= 2
        else:
            good += 1
            tolerated = hysteresis - 1 if consecutive else tolerated
            if good == window:
                scale, good, tolerated = scale * 2, 0, hysteresis - 1
        scales.append(scale)
    return scales


@given(
    st.lists(st.booleans(), max_size=40),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 2),
    st.booleans(),
    st.integers(0, 40),
)
def test_scales_follow_the_rule_and_survive_a_checkpoint(
    steps: list[bool], window: int, hysteresis: int, delay: int, consecutive: bool, stop: int
) -> None:
    config = LossScaleConfig(
        initial=1024.0,
        growth_interval=window,
        growth_delay=delay,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
        minimum=1e-30,
    )
    scaler, found = LossScaler(config), []
    for number, finite in enumerate(steps):
        if number == stop:
            state, scaler = scaler.state_dict(), LossScaler(config)
            scaler.load_state_dict(state)
        scaler.update(finite=finite)
        found.append(scaler.scale)
    assert found == by_the_rule(steps, window, hysteresis, delay, consecutive)
    assert scaler.skipped == steps.count(False)


def test_an_overflow_that_is_tolerated_does_not_end_the_run_at_the_minimum() -> None:
    scaler = LossScaler(LossScaleConfig(initial=1.0, minimum=1.0, hysteresis=2))
    scaler.update(finite=False)
    with pytest.raises(FloatingPointError, match="smallest loss scale"):
        scaler.update(finite=False)


def test_a_state_that_tolerates_more_than_the_config() -> None:
    scaler = LossScaler(LossScaleConfig(hysteresis=1))
    scaler.load_state_dict({"scale": 8.0, "good_steps": 0, "skipped": 0, "until_lower": 3})
    scaler.update(finite=False)
    assert scaler.scale == 4.0


def test_without_hysteresis_the_state_is_as_before() -> None:
    assert LossScaler(LossScaleConfig()).state_dict() == {"scale": 65536.0, "good_steps": 0, "skipped": 0}
