"""Check that the dotted names that docstrings of the package put in backticks are names of something.

A name is resolved, without running any code, as a setting (`mesh.tensor`), a module of the package or what is in it
(`optim.fused`, `layout.pack`), or a member of one of its classes (`ZeroEngine.load`). Names that begin with another
library's, or with a variable that readers know (`p.grad`), are left alone.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "zero_strategy"
DOTTED = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\([^`]*\))?`(?!`)")
FILES = re.compile(r".*\.(cc|index\.json|json|pkl|pt|py|safetensors)")
LIBRARIES = frozenset(
    {
        "accelerate", "deepspeed", "hydra", "inspect", "json", "lightning", "math", "megatron", "megatron_fsdp", "nn",
        "numpy", "os", "re", "time", "torch", "transformers",
    }
)  # fmt: skip
"""Other libraries."""
THEIRS = frozenset(
    {
        "Event", "Fabric", "LightningModule", "Logger", "MyModule", "Optimizer", "ShardedTensor", "distributed", "moe",
        "straggler", "versions", "zero",
    }
)  # fmt: skip
"""Classes and modules of other libraries, or of the user, that are named without these."""
VARIABLES = frozenset(
    {
        "accelerator", "buffer", "cls", "engine", "fabric", "flat", "loader", "logger", "loss", "model", "model_class",
        "module", "optimizer", "p", "plan", "self", "trainer", "weight", "_average_model",
    }
)  # fmt: skip
"""Objects that docstrings show at work."""


@dataclass
class Members:
    """What a module or a class has.

    Attributes:
        names: Names that are bound in it.
        bases: Of a class, the names of its bases.
    """

    names: set[str] = field(default_factory=set)
    bases: list[str] = field(default_factory=list)


class Names:
    """Modules, classes and settings below a folder.

    Args:
        root: The checkout.
    """

    def __init__(self, root: Path) -> None:
        self.modules: dict[str, Members] = {}
        self.classes: defaultdict[str, list[Members]] = defaultdict(list)
        self.sections: defaultdict[str, set[str]] = defaultdict(set)
        for path in sorted((root / PACKAGE).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            self._read(ast.parse(path.read_text(encoding="utf-8")), ".".join(parts).removesuffix(".__init__"))

    def _read(self, tree: ast.Module, module: str) -> None:
        self.modules[module] = Members(set(_bound(tree.body)))
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            members = Members(set(_bound(node.body)), [ast.unparse(base).split("[")[0] for base in node.bases])
            stored = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
            members.names.update(
                each.attr for each in stored if isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
            )
            self.classes[node.name].append(members)
            for statement in node.body:  # a section of the settings: prefix: ClassVar[str] = "mesh."
                if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == "prefix":
                    value = statement.value
                    if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value:
                        self.sections[value.value.rstrip(".")] |= members.names

    def has(self, name: str) -> bool:
        """True if a dotted name is one of something here."""
        first, *rest = name.split(".")
        if rest[0] in self.sections.get(first, ()):
            return True
        if first in self.classes:
            return self._in_class(first, rest[0])
        # What the package itself gives, or any module of that name.
        modules = [key for key in self.modules if key.endswith(f".{first}")]
        starts = [PACKAGE] if first == PACKAGE else [f"{PACKAGE}.{first}", *modules]
        return any(self._in_module([*start.split("."), *rest]) for start in starts)

    def _in_module(self, parts: list[str]) -> bool:
        known = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in self.modules), 0)
        if known in (0, len(parts)):
            return known > 0
        name = parts[known]
        if name not in self.modules[".".join(parts[:known])].names:
            return False
        return known + 1 == len(parts) or name not in self.classes or self._in_class(name, parts[known + 1])

    def _in_class(self, name: str, member: str, seen: frozenset[str] = frozenset()) -> bool:
        for found in self.classes[name]:
            if member in found.names:
                return True
            # Not those on the way here: a class may be named as its base is, and both are looked at as one.
            for own in {base.split(".")[-1] for base in found.bases} - {name, *seen}:
                if own not in self.classes:
                    if own not in ("Protocol", "ABC", "NamedTuple"):
                        return True  # a class of another library may have anything
                elif self._in_class(own, member, seen | {name}):
                    return True
        return False


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    """Names that the statements of a module or a class bind."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _bound([each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)])


def dead_names(root: Path) -> Iterator[str]:
    """Names in backticks that nothing here has, as "path:line: ..."."""
    names = Names(root)
    for path in sorted((root / PACKAGE).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                continue
            if not isinstance(text := node.value.value, str):
                continue
            for match in DOTTED.finditer(text):
                name = match[1]
                if name.split(".")[0] in LIBRARIES | THEIRS | VARIABLES or FILES.fullmatch(name) or names.has(name):
                    continue
                line = node.lineno + text.count("\n", 0, match.start())
                yield f"{path}:{line}: `{name}` is nothing here: name what is meant, by its module or class"


def main() -> int:
    """Print what is found; 0 if that is nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(), help="the checkout (default: this folder)")
    root: Path = parser.parse_args().root
    if not (root / PACKAGE).is_dir():
        parser.error(f"{root} has no {PACKAGE}: give the root of a checkout")
    found = list(dead_names(root))
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
