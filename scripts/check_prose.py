"""Check the prose of docs and docstrings: lengths of lines, first words, the size of the map of the architecture.

Docstrings of the package open with a whole sentence: a subject or an imperative.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LINE = 100
ROW = 200
MAP = ("docs/architecture.md", 250)
PACKAGES = ("zero_strategy", "examples", "benchmarks", "tests")
RIDDLES = frozenset(["What", "Which", "Where", "How", "Whether", "Who", "Whoever", "Whose", "When"])


FRAGMENTS = re.compile(r"(Of|As|Those|Its|It|By|To|From|In|At|With|And|Likewise|The same)\b")
"""Openings of docstrings that leave their subject to the reader."""


class Finding(NamedTuple):
    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def pages(root: Path) -> list[Path]:
    """The README and every page of the docs."""
    return [path for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))) if path.is_file()]


def long_lines(path: Path) -> Iterator[Finding]:
    """Lines and rows of tables that are too long, outside blocks of code. Lines with a URL may be longer."""
    fence = ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        mark = re.match(r"\s*(`{3,}|~{3,})", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and line.strip().startswith(fence):
            fence = ""
        elif not fence:
            row = line.lstrip().startswith("|")
            limit = ROW if row else LINE
            if len(line) > limit and (row or "://" not in line):
                kind = "a row of a table" if row else "a line"
                yield Finding(path, number, f"{kind} of {len(line)} characters, at most {limit}; break or split it")


def riddles(path: Path) -> Iterator[Finding]:
    """Docstrings of modules, classes and functions that open with a relative or interrogative word."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = re.match(r"\w*", ast.get_docstring(node) or "")
        if first and first[0] in RIDDLES:
            message = f"a docstring opens with {first[0]!r}; begin with a noun or an imperative"
            yield Finding(path, node.body[0].lineno, message)


def fragments(root: Path) -> Iterator[Finding]:
    """Docstrings of the package's classes and functions that begin without a subject or a verb."""
    for path in sorted((root / "zero_strategy").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if first := FRAGMENTS.match(ast.get_docstring(node) or ""):
                message = f"a docstring opens with {first[0]!r}; say what it is or does in a sentence of its own"
                yield Finding(path, node.body[0].lineno, message)


def long_map(root: Path) -> Iterator[Finding]:
    """The map of the architecture, if it has too many lines."""
    name, limit = MAP
    path = root / name
    if path.is_file() and (lines := len(path.read_text(encoding="utf-8").splitlines())) > limit:
        yield Finding(path, lines, f"{lines} lines, at most {limit}; move what is no map to pages of docs/design")


def findings(root: Path) -> list[Finding]:
    """All violations below a folder, in the order of the paths that are read."""
    found = [finding for page in pages(root) for finding in long_lines(page)]
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            found += riddles(path)
    return [*found, *fragments(root), *long_map(root)]


def main() -> int:
    """Print what is found; 0 if that is nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(), help="the checkout (default: this folder)")
    root: Path = parser.parse_args().root
    if not any((root / package).is_dir() for package in PACKAGES):
        parser.error(f"{root} has none of {', '.join(PACKAGES)}: give the root of a checkout")
    found = findings(root)
    for finding in found:
        print(finding)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
