"""Settings under their former names."""

from __future__ import annotations

import pytest

from zero_strategy import load_config
from zero_strategy.config.load import FORMER_KEYS

VALUES = {
    "guard": "strict",
    "release_after_backward": False,
    "release_after_forward": False,
    "rendezvous_seconds": 7.5,
}


@pytest.mark.parametrize("former", FORMER_KEYS)
def test_a_former_name_sets_the_same(former: str) -> None:
    present = FORMER_KEYS[former]
    value = VALUES[former]
    assert load_config({former: value}) == load_config({present: value})


def test_both_names_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="rendezvous_seconds is the former name of barrier_seconds, and both are set"):
        load_config({"rendezvous_seconds": 3.0, "barrier_seconds": 3.0})
