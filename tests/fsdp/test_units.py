"""Units found by themselves or named; ties that span units; and the names of it all."""

from __future__ import annotations

import pytest
from torch import nn

from tests.engine.nets import Block, Net
from zero_strategy.fsdp.layout import aliases, find_units


def names(root: nn.Module, **options: object) -> list[str]:
    return [spec.name for spec in find_units(root, **options)]  # type: ignore[arg-type]


def check_complete(root: nn.Module, **options: object) -> dict[str, list[str]]:
    """Every parameter in one unit, under its first name, inside the unit's module or its descendants."""
    specs = find_units(root, **options)  # type: ignore[arg-type]
    assert specs[0].name == "" and specs[0].module is root
    found = {spec.name: [name for name, _ in spec.parameters] for spec in specs}
    everything = [id(p) for spec in specs for _, p in spec.parameters]
    assert sorted(everything) == sorted(id(p) for p in root.parameters())
    for spec in specs:
        inside = {id(p) for p in spec.module.parameters()}
        assert all(id(p) in inside for _, p in spec.parameters)
        assert spec.module is root.get_submodule(spec.name)
        for name, p in spec.parameters:
            assert root.get_parameter(name) is p
    return found


def test_repeated_blocks_are_units() -> None:
    found = check_complete(Net(3), min_numel=0)
    assert list(found) == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert found[""] == ["scale", "stem.weight", "stem.bias", "head.weight", "head.bias"]
    assert found["blocks.1"][0] == "blocks.1.norm.weight" and len(found["blocks.1"]) == 6


def test_small_blocks_stay_with_the_root() -> None:
    size = sum(p.numel() for p in Block().parameters())
    assert names(Net(3), min_numel=size) == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert names(Net(3), min_numel=size + 1) == [""]


def test_a_single_block_is_no_repetition() -> None:
    assert names(Net(1), min_numel=0) == [""]


def test_a_model_without_containers_is_one_unit() -> None:
    assert names(nn.Linear(3, 3), min_numel=0) == [""]
    assert names(nn.Identity(), min_numel=0) == [""]


def test_repetitions_inside_of_large_members() -> None:
    stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block(), nn.Linear(6, 6)))
    found = check_complete(stages, min_numel=0)
    assert "" in found and all(name.count(".") <= 1 for name in found)
    assert sum(len(parameters) for name, parameters in found.items() if name) >= 4 * 6


def test_containers_without_a_forward_are_no_units() -> None:
    root = nn.ModuleDict({"a": nn.ModuleList([Block(), Block()]), "b": nn.ModuleList([Block(), Block()])})
    assert names(root, min_numel=0) == ["", "a.0", "a.1", "b.0", "b.1"]


def test_units_by_class_and_pattern() -> None:
    assert names(Net(3), classes=["Block"]) == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert names(Net(3), classes=["Linear"])[1:3] == ["stem", "blocks.0.up"]
    assert names(Net(3), patterns=["blocks.[02]", "head"]) == ["", "blocks.0", "blocks.2", "head"]
    nested = check_complete(Net(2), classes=["Block"], patterns=["blocks.0.up"])
    assert nested["blocks.0.up"] == ["blocks.0.up.weight", "blocks.0.up.bias"]
    assert "blocks.0.up.weight" not in nested["blocks.0"] and "blocks.0.down.weight" in nested["blocks.0"]


def test_what_matches_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'Blok'.*Block"):
        find_units(Net(2), classes=["Blok"])
    with pytest.raises(ValueError, match=r"'layers\.\*'"):
        find_units(Net(2), patterns=["layers.*"])
    with pytest.raises(ValueError, match="no module name"):
        find_units(nn.Linear(2, 2), patterns=["weight"])


def test_ties_go_to_the_closest_common_unit() -> None:
    root = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    root[0][0].up.weight = root[0][1].up.weight  # within the first
    root[0][0].norm.bias = root[1][1].norm.bias  # across
    root[1][0].down.weight = root[1][0].down.weight
    found = check_complete(root, patterns=["0", "1", "?.?"])
    assert found["0"] == ["0.0.up.weight"]
    assert found[""] == ["0.0.norm.bias"]
    assert aliases(root) == {"0.1.up.weight": "0.0.up.weight", "1.1.norm.bias": "0.0.norm.bias"}


def test_a_tie_between_a_unit_and_its_parent() -> None:
    model = Net(2)
    model.head.bias = model.blocks[1].norm.bias = nn.Parameter(model.head.bias.new_zeros(6))
    found = check_complete(model, classes=["Block"])
    assert "blocks.1.norm.bias" in found[""] and "blocks.1.norm.bias" not in found["blocks.1"]


def test_a_module_under_two_names() -> None:
    block = Block()
    root = nn.ModuleDict({"a": nn.ModuleList([block, Block()]), "b": nn.ModuleList([block, Block()])})
    found = check_complete(root, min_numel=0)
    assert sum(name.endswith("up.weight") for parameters in found.values() for name in parameters) == 3


def test_prefixes_of_names_are_not_parents() -> None:
    root = nn.Module()
    root.layer, root.layer1 = Block(), Block()
    found = check_complete(root, patterns=["layer"])
    assert all(name.startswith("layer1.") for name in found[""])
