"""Modules that are gathered as one, whatever units their parts would be: `set_z3_leaf_modules` and its kin.

Call them before the engine is made. The mark is an attribute of the module, so that copies of it have it as well.
"""

from __future__ import annotations

from collections.abc import Sequence

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
