"""The documents that describe the code name files, functions and classes that exist."""

from __future__ import annotations

import ast
import re
import runpy
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "zero_strategy"
MAP = ROOT / "docs" / "architecture.md"
PAGES = [MAP, *sorted((ROOT / "docs" / "design").glob("*.md")), ROOT / "README.md"]
GUIDES = [path for folder in ("quickstart", "guides") for path in sorted((ROOT / "docs" / folder).glob("*.md"))]
LINES, WIDTH, ROW_WIDTH = 250, 100, 200

SOURCE = re.compile(r"`([\w./-]+\.(?:py|cpp|cu|cuh|h|toml|md))`")
FOLDER = re.compile(r"`([\w.-]+(?:/[\w.-]+)*/)`")
MEMBER = re.compile(r"`([A-Z]\w+)\.(\w+)(?:\(\))?`")
NAME_IN_FILE = re.compile(r"`([\w.]+)` in `([\w/]+\.py)`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def prose(page: Path) -> list[tuple[int, str]]:
    """Lines outside of code fences, with their numbers."""
    fenced, found = False, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            found.append((number, line))
    return found


@cache
def defined_in(path: Path) -> frozenset[str]:
    """Names of a module's functions and classes, and `Class.method`."""
    found = set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found.update(f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef))
    return frozenset(found)


@cache
def files_of_classes() -> dict[str, list[str]]:
    """Source text of the files that define each class of the package."""
    found: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        for name in re.findall(r"^class (\w+)", text, re.MULTILINE):
            found.setdefault(name, []).append(text)
    return found


def behaviours() -> list[tuple[str, Path, list[str]]]:
    """Rows of the table behaviour -> file: behaviour, file, names in it."""
    text = MAP.read_text()
    section = text.split("## Behaviour -> file", 1)[1].split("\n## ", 1)[0]
    rows = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| ") and cells[0] not in ("behaviour", "---"):
            [file] = SOURCE.findall(cells[1])
            rows.append((cells[0], PACKAGE / file, re.findall(r"`([\w.]+)`", cells[2])))
    return rows


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = [(number, name) for number, line in prose(page) for name in SOURCE.findall(line) + FOLDER.findall(line)]
    lost = [(number, name) for number, name in named if not ((PACKAGE / name).exists() or (ROOT / name).exists())]
    assert not lost, f"{page.relative_to(ROOT)} names files that are neither in the package nor in the repository"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_beside_files_and_members_of_classes_exist(page: Path) -> None:
    text = " ".join(line for _, line in prose(page))
    lost = [(name, file) for name, file in NAME_IN_FILE.findall(text) if name not in defined_in(PACKAGE / file)]
    for owner, member in MEMBER.findall(text):
        files = files_of_classes().get(owner)
        if files is not None and not any(re.search(rf"\b{member}\b", source) for source in files):
            lost.append((owner, member))
    assert not lost, "named classes, functions or members are not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    links = [(number, link) for number, line in prose(page) for link in LINK.findall(line) if "://" not in link]
    assert not [(number, link) for number, link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lines_of_a_page_are_short(page: Path) -> None:
    def is_long(line: str) -> bool:
        return len(line) > (ROW_WIDTH if line.startswith("|") else WIDTH) and "://" not in line

    assert not [(number, len(line)) for number, line in prose(page) if is_long(line)]


def test_the_map_is_short() -> None:
    assert len(MAP.read_text().splitlines()) <= LINES


def test_each_behaviour_is_in_its_file() -> None:
    rows = behaviours()
    assert len(rows) >= 40
    lost = [
        (behaviour, str(file.relative_to(PACKAGE)), name)
        for behaviour, file, names in rows
        for name in names
        if not file.exists() or name not in defined_in(file)
    ]
    assert not lost, "docs/architecture.md names functions or classes that their file does not define"


def test_the_map_has_every_layer_and_page() -> None:
    text = MAP.read_text()
    layers = re.findall(r'^    "zero_strategy\.(\w+)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    picture = text.split("## Packages", 1)[1].split("```")[1]
    assert re.findall(r"^(\w{2,})", picture, re.MULTILINE) == layers
    pages = {page.stem for page in PAGES if page.parent.name == "design"}
    assert set(re.findall(r"\]\(design/(\w+)\.md\)", text)) == pages


def test_pages_made_from_the_code_are_up_to_date() -> None:
    """`make reference` writes them: every setting, and the help of every command."""
    reference = runpy.run_path(str(ROOT / "scripts" / "make_reference.py"))
    for path, text in reference["pages"]().items():
        assert (ROOT / path).read_text() == text, f"{path}: run `make reference`"


def is_there(module: ModuleType, name: str) -> bool:
    """True if a module has a name; by its own list where it imports Ray, which tests do without."""
    if module.__name__ == "zero_strategy.integrations.ray" and find_spec("ray") is None:
        return name in module.__all__
    return hasattr(module, name)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_blocks_of_guides_are_valid(page: Path) -> None:
    """Python compiles, and names of this package that it imports are there; YAML is read by our config."""
    for kind, block in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        if kind in ("python", "py"):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zero_strategy"):
                    module = import_module(node.module or "")
                    assert all(is_there(module, name.name) for name in node.names), ast.unparse(node)


def test_every_page_is_in_the_site() -> None:
    """`make docs` builds the site; a page that its navigation leaves out would be found by nobody."""
    listed = set(re.findall(r"[\w./]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} == listed


def docstrings(path: Path) -> list[str]:
    found = (ast.get_docstring(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, DOCUMENTED))
    return [text for text in found if text]


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def test_examples_in_docstrings_are_blocks_of_code() -> None:
    """The site renders what stands below `Example:` as Markdown; without a fence its lines run together."""
    texts = [(path, text) for path in sorted(PACKAGE.rglob("*.py")) for text in docstrings(path)]
    bare = [
        str(path.relative_to(ROOT))
        for path, text in texts
        for found in re.finditer(r"^( *)Examples?:\n(.*?)(?=^\1\S|\Z)", text, re.DOTALL | re.MULTILINE)
        if not re.match(r" *```python\n(.*?)^ *```\s*\Z", found[2], re.DOTALL | re.MULTILINE)
    ]
    assert not bare, "write the example between ```python and ```"
    assert sum("Example:" in text for _, text in texts) >= 10


def test_headings_of_the_api_page_can_be_imported() -> None:
    """A heading is the path that users import from; `members:` are names that are there."""
    text = (ROOT / "docs" / "reference" / "api.md").read_text()
    for path, options in re.findall(r"^::: ([\w.]+)\n((?:    .*\n|\n)*)", text, re.MULTILINE):
        module, _, name = path.rpartition(".")
        assert is_there(import_module(module), name), path
        if module == "zero_strategy.integrations.ray":
            continue
        found = getattr(import_module(module), name)
        members = re.findall(r"\w+", options.partition("members:")[2])
        assert all(hasattr(found, member) and not member.startswith("_") for member in members), path
        assert path == f"zero_strategy.{name}" or not hasattr(import_module("zero_strategy"), name) or module in (
            "zero_strategy.integrations.fabric", "zero_strategy.replay", "zero_strategy.verify",
        ), f"{path}: the shorter path is the public one"  # fmt: skip
