"""Tests of the parts of the conformance page that need no model."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.conformance import foreign_tests, sections, zoo, zoo_pool


def test_conformance_page_keeps_the_sections_that_were_not_made(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    sections.update(page, {"": "# Page", "First": "one", "Second": "two"})
    sections.update(page, {"": "# Page", "Second": "new", "Third": "three"})
    assert sections.split(page.read_text()) == {"": "# Page", "First": "one", "Second": "new", "Third": "three"}
    assert page.read_text().endswith("three\n")


def test_conformance_table_has_no_bar_inside_a_cell() -> None:
    assert sections.table(["a"], [["x | y"]])[-1] == "| x / y |"


def test_zoo_state_gap_finds_values_names_and_shapes() -> None:
    state = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3])}
    assert zoo.state_gap(state, state) == (0.0, "")
    gap, where = zoo.state_gap({**state, "a": torch.tensor([1.0, 2.5])}, state)
    assert (gap, where) == (0.25, "a")
    assert zoo.state_gap({**state, "a": torch.tensor([1.0, float("nan")])}, state) == (float("inf"), "a")
    assert zoo.state_gap({"a": state["a"]}, state)[0] == float("inf")
    assert zoo.state_gap({**state, "a": torch.ones(3)}, state)[0] == float("inf")


def test_zoo_takes_the_worse_of_two_ranks() -> None:
    equal, bad = ({"kind": "x", "verdict": verdict, "words": ""} for verdict in ("equal", "BAD"))
    assert zoo_pool.worse("x", [equal, bad])["verdict"] == "BAD"
    assert zoo_pool.worse("x", [equal, equal])["verdict"] == "equal"
    assert zoo_pool.worse("x", [equal])["verdict"] == "BAD"
    assert zoo_pool.worse("x", [])["verdict"] == "BAD"


def test_foreign_tests_count_what_no_reason_explains() -> None:
    entry = {"when": "call", "outcome": "failed", "ours": True, "seconds": 1.0}
    entries = [
        {
            **entry,
            "test": "a/test_x.py::test_one[1]",
            "words": "IsADirectoryError: [Errno 21] Is a directory: 'x.ckpt'",
        },
        {**entry, "test": "a/test_x.py::test_two", "words": "assert 1 == 2"},
        {**entry, "test": "a/test_x.py::test_three", "words": "", "outcome": "passed"},
        {**entry, "test": "a/test_x.py::test_four", "words": "assert 0", "plain": True},
    ]
    text, failed = foreign_tests.section(foreign_tests.LIGHTNING, entries, 3)
    assert failed == ["test_x.py::test_two"]
    assert "| 4 | 1 (1) | 0 | 1 | 1 | 1 |" in text and "DDPStrategy`, too: `test_four`" in text and "`test_one`" in text
