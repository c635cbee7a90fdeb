"""Units: module subtrees that are unsharded and reduced together, and leaf modules.

`set_z3_leaf_modules` and its kin.

Call them before the engine is made. The mark is an attribute of the module, so that copies of it have it as well.

module subtrees whose parameters are gathered and reduced together.

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

_MARK = "_gathered_as_one"


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark all modules of some classes: their parameters are fetched and released together.

    Args:
        model: Where to look, itself included.
        leaf_module_classes: Classes, or their names, qualified or not.
        raise_if_not_found: No module of them is an error.

    Returns:
        The modules that were marked.

    Raises:
        TypeError: If a class is neither a module's nor a name.
        ValueError: If there is none.
    """
    found = _of(leaf_module_classes, model)
    return _mark(model, found, True, f"classes {list(leaf_module_classes)}", raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules by their names in `model`."""
    found = [module for name, module in model.named_modules() if name in module_names]
    return _mark(model, found, True, f"names {list(module_names)}", raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules whose names end with one of some suffixes."""
    found = [module for name, module in model.named_modules() if name.endswith(tuple(module_name_suffixes))]
    return _mark(model, found, True, f"suffixes {list(module_name_suffixes)}", raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the mark from all modules of some classes; arguments as of `set_z3_leaf_modules`."""
    found = _of(leaf_module_classes, model)
    return _mark(model, found, False, f"classes {list(leaf_module_classes)}", raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or take the mark from it."""
    _mark(model, [model], flag, "", False)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """True if a module is marked."""
    return bool(model.__dict__.get(_MARK, False))


def joined_units(root: nn.Module, units: Sequence[str]) -> list[str]:
    """Names of units, in the order of `named_modules`; a marked module takes the place of those inside it."""
    found = set(units)
    marked = [name for name, module in root.named_modules() if z3_leaf_module(module)]
    for leaf in marked:
        inside = {unit for unit in found if unit.startswith(f"{leaf}." if leaf else "")}
        if inside:
            found = (found - inside) | ({leaf} if leaf else set())
    return [name for name, _ in root.named_modules() if name in found] if marked else list(units)


def _of(classes: Sequence[type[nn.Module] | str], model: nn.Module) -> list[nn.Module]:
    for wanted in classes:
        if not isinstance(wanted, str) and not (isinstance(wanted, type) and issubclass(wanted, nn.Module)):
            raise TypeError(f"leaf_module_classes takes classes of modules, or their names, not {wanted!r}")
    return [
        module
        for module in model.modules()
        if any(_name_matches(type(module), w) if isinstance(w, str) else isinstance(module, w) for w in classes)
    ]


def _name_matches(cls: type, wanted: str) -> bool:
    return wanted in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")


def _mark(model: nn.Module, found: list[nn.Module], flag: bool, what: str, needed: bool) -> list[nn.Module]:
    if not found and needed:
        known = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(f"no module of {type(model).__name__} has the {what}; classes in this model: {known}")
    for module in found:
        module.__dict__[_MARK] = flag
    return found


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
    names = _named_units(root, classes, patterns) if classes or patterns else _repeated_units(root, min_numel)
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
        unit for unit in units if unit == "" or all(owner == unit or owner.startswith(f"{unit}.") for owner in owners)
    ]
    return max(holding, key=len)
