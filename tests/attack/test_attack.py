"""One round of each short row of the suite of attacks; `make attack` runs all of them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.attack.rows import Hang, Row, harmless, outcome, refused
from tests.attack.table import ROWS


@pytest.mark.parametrize("row", [row for row in ROWS if row.is_test], ids=lambda row: row.name)
def test_attack_is_held(row: Row, tmp_path: Path) -> None:
    attempts = list(row.run(tmp_path, random.Random(0), 1))
    assert attempts and not (wrong := [each for each in attempts if each.wrong]), wrong


def test_what_does_not_hold_is_seen() -> None:
    def forever() -> None:
        while True:
            pass

    hung = outcome(forever, seconds=0.2)
    assert isinstance(hung.error, Hang) and refused("x", hung).wrong and harmless("x", hung, None).wrong

    def raises(error: Exception) -> None:
        raise error

    assert refused("x", outcome(lambda: 1)).wrong and harmless("x", outcome(lambda: 1), 2).wrong
    assert refused("x", outcome(lambda: raises(TypeError("y")))).wrong
    assert refused("x", outcome(lambda: raises(ValueError("another file"))), names="file.pt").wrong
    assert refused("x", outcome(lambda: raises(ValueError("file.pt \x1b[31m"))), names="file.pt").wrong
    assert not refused("x", outcome(lambda: raises(ValueError("file.pt is damaged"))), names="file.pt").wrong
