"""A pytest plugin: transformers' own Trainer tests with a ZeroTrainer under the name `Trainer`.

ZERO_STAGE=3 python -m pytest -p tests.conformance.transformers_plugin -p tests.conformance.outcomes ...
"""

from __future__ import annotations

import os
from typing import Any

import transformers

from tests.conformance import outcomes
from tests.conformance.foreign_tests import PLAIN
from zero_strategy.integrations.transformers import make_zero_trainer


def under_zero(base: Any) -> Any:
    """The class of a Trainer under ZeRO, with a config for tests that pass none."""
    sharded: Any = make_zero_trainer(base)

    class Trainer(sharded):  # type: ignore[misc]
        """A Trainer that notes for which test it was made."""

        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            outcomes.used()
            keywords.setdefault("zero_config", {"stage": int(os.environ["ZERO_STAGE"]), "timeout_seconds": 60.0})
            super().__init__(*arguments, **keywords)

    Trainer.__name__ = Trainer.__qualname__ = base.__name__
    return Trainer


if os.environ["ZERO_STAGE"] != PLAIN:
    transformers.Trainer = under_zero(transformers.Trainer)  # type: ignore[misc]
    transformers.Seq2SeqTrainer = under_zero(transformers.Seq2SeqTrainer)  # type: ignore[misc]
