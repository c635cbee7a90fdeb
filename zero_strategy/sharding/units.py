"""Finding units: module subtrees whose parameters are gathered and reduced together.

A unit is named by the user (class or name pattern) or found: the large enough members of containers (`ModuleList`,
`Sequential`, `ModuleDict`) whose class repeats there, or that hold no such repetition themselves. Everything else
belongs to the root unit.
A parameter used by two units belongs to their closest common ancestor that is a unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from zero_strategy.sharding.leaf_modules import joined_units

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass
class UnitSpec:
    """A unit before any memory is allocated for it.

    Attributes:
        name: Name of the module in the root ("" for the root itself).
        module: The module whose forward brackets the use of the parameters.
        parameters: First name and object of every parameter that belongs to this unit, in registration order.
    """

    name: str
    module: nn.Module
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)


def find_units(
    root: nn.Module, *, classes: Sequence[str] = (), patterns: Sequence[str] = (), min_numel: int = 0
) -> list[UnitSpec]:
    """Divide the parameters of `root` into units.

    Args:
        root: The module to divide.
        classes: Class names whose instances are units. With `patterns` empty and `classes` empty, units are found.
        patterns: Shell-style patterns; a module whose name matches one is a unit.
        min_numel: A candidate with fewer elements stays with its parent (found units only).

    Returns:
        The root unit first, then the others in the order of `named_modules`; units without parameters are left out
        (the root is always there).

    Raises:
        ValueError: If a class or a pattern matches no module.
    """
    names = (
        _named_units(root, classes, patterns) if classes or patterns else _repeated_units(root, min_numel)
    )
    specs = {name: UnitSpec(name, root.get_submodule(name)) for name in ("", *joined_units(root, names))}
    for owner, name, parameter in _first_uses(root, specs):
        specs[owner].parameters.append((name, parameter))
    return [spec for name, spec in specs.items() if spec.parameters or name == ""]


def aliases(root: nn.Module) -> dict[str, str]:
    """Further names of tied parameters: {alias: first name}, in registration order."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        kept = first.setdefault(id(parameter), name)
        if kept != name:
            found[name] = kept
    return found


def _named_units(root: nn.Module, classes: Sequence[str], patterns: Sequence[str]) -> list[str]:
    modules = [(name, module) for name, module in root.named_modules() if name]
    names = [
        name
        for name, module in modules
        if type(module).__name__ in classes or any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    for wanted in classes:
        if not any(type(module).__name__ == wanted for _, module in modules):
            known = sorted({type(module).__name__ for _, module in modules})
            raise ValueError(f"units.classes: no module is a {wanted!r}; classes in this model: {known}")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in modules):
            known = [name for name, _ in modules[:5]]
            raise ValueError(f"units.patterns: no module name matches {pattern!r}; names in this model: {known} ...")
    return names


def _repeated_units(root: nn.Module, min_numel: int) -> list[str]:
    """Members of containers: those whose class repeats, and those that are large and hold no repetition inside."""

    def visit(prefix: str, module: nn.Module) -> list[str]:
        children = list(module.named_children())
        classes = Counter(type(child) for _, child in children)
        is_container = isinstance(module, _CONTAINERS) and len(children) > 1
        found: list[str] = []
        for child_name, child in children:
            name = f"{prefix}{child_name}"
            member = is_container and (classes[type(child)] > 1 or not isinstance(child, _CONTAINERS))
            member = member and not isinstance(child, (nn.ModuleList, nn.ModuleDict))  # they have no forward
            large = sum(parameter.numel() for parameter in child.parameters()) >= max(1, min_numel)
            inner = [] if member and large and classes[type(child)] > 1 else visit(f"{name}.", child)
            found += inner or ([name] if member and large else [])
        return found

    return visit("", root)


def _first_uses(root: nn.Module, units: Iterable[str]) -> list[tuple[str, str, nn.Parameter]]:
    """(unit, first name, parameter) of every distinct parameter, in registration order."""
    names = list(units)
    uses: dict[int, list[str]] = {}
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        uses.setdefault(id(parameter), []).append(_closest(name, names))
        first.setdefault(id(parameter), (name, parameter))
    return [(_common(uses[key], names), name, parameter) for key, (name, parameter) in first.items()]


def _closest(name: str, units: Sequence[str]) -> str:
    """The innermost unit that holds the parameter or module `name`."""
    return max((unit for unit in units if unit == "" or name == unit or name.startswith(f"{unit}.")), key=len)


def _common(owners: Sequence[str], units: Sequence[str]) -> str:
    """The innermost unit that holds all of `owners`."""
    holding = [
        unit
        for unit in units
        if unit == "" or all(owner == unit or owner.startswith(f"{unit}.") for owner in owners)
    ]
    return max(holding, key=len)
