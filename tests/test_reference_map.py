"""`docs/reference/names_of_deepspeed_and_megatron.md` against the code: every row's path, signature and test."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from zero_strategy.compat.megatron import core_utils, fsdp_utils

ROOT = Path(__file__).parent.parent
CHAPTERS = {
    "Coming from the DeepSpeed 0.3 API": 255,
    "Megatron core utilities": 118,
    "Megatron-FSDP utilities": 39,
}
INTEGRATIONS = {"Megatron core utilities": core_utils, "Megatron-FSDP utilities": fsdp_utils}
KINDS = {"class", "function", "method", "option", "behaviour", "constant"}


class Row(NamedTuple):
    there: str
    kind: str
    here: str
    test: str


def signatures(chapter: str) -> dict[str, str]:
    """Names and signatures in a chapter's blocks of code, each signature on one line."""
    blocks = "\n".join(re.findall(r"^```python\n(.*?)^```", chapter, re.DOTALL | re.MULTILINE))
    found = {}
    for node in ast.parse(blocks).body:
        line = " ".join((ast.get_source_segment(blocks, node) or "").split())
        found[line.partition("(")[0]] = re.sub(r"\( | \)|,(?= \))", lambda match: match[0].strip(" ,"), line)
    return found


def rows() -> dict[str, list[Row]]:
    """Rows of the tables by chapter, with signatures from below them and the tests of `reference_map.json`."""
    tests: dict[str, dict[str, str]] = json.loads((ROOT / "tests" / "reference_map.json").read_text())
    found: dict[str, list[Row]] = {}
    for chapter in (ROOT / "docs" / "reference" / "names_of_deepspeed_and_megatron.md").read_text().split("\n## ")[1:]:
        title, calls = chapter.partition("\n")[0], signatures(chapter)
        for line in chapter.splitlines():
            if not line.startswith("| ") or line.startswith(("| there", "| ---")):
                continue
            cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            assert len(cells) == 3, line
            there, kind, here = cells
            if below := re.fullmatch(r"`([\w.]+)\(\.\.\.\)`, below", there):
                there = f"`{calls.pop(below[1])}`"
            found.setdefault(title, []).append(Row(there, kind, here.strip("`"), tests[title].pop(there)))
        assert calls == {}, f"signatures of no row: {list(calls)}"
    assert not any(tests.values()), f"tests of no row: {tests}"
    return found


ROWS = rows()


def resolve(path: str) -> tuple[Any, bool]:
    """Object that a dotted path names, and whether it is a function that gets an object first."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        try:
            if importlib.util.find_spec(module) is None:
                continue
        except ModuleNotFoundError:
            continue
        found: Any = importlib.import_module(module)
        method = False
        for name in parts[end:]:
            owner = found
            found = inspect.getattr_static(owner, name) if inspect.isclass(owner) else getattr(owner, name)
            method = inspect.isclass(owner) and inspect.isfunction(found)
            if isinstance(found, classmethod):
                found = getattr(owner, name)
        return found, method
    raise ImportError(path)


def parameters(thing: Any, method: bool) -> list[inspect.Parameter]:
    found = list(inspect.signature(thing).parameters.values())
    return found[method:]


def documented(call: str) -> list[tuple[str, Any]]:
    """Names and defaults of `name(a, b=1, *args)`, in order."""
    (function,) = ast.parse(f"def f{call[call.index('(') :]}: ...").body
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    positional: list[tuple[str, Any]] = [(one.arg, inspect.Parameter.empty) for one in given.args]
    for number, default in enumerate(reversed(given.defaults), 1):
        positional[-number] = (positional[-number][0], ast.literal_eval(default))
    names = list(positional)
    names += [("*" + given.vararg.arg, inspect.Parameter.empty)] if given.vararg else []
    names += [
        (one.arg, inspect.Parameter.empty if default is None else ast.literal_eval(default))
        for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    names += [("**" + given.kwarg.arg, inspect.Parameter.empty)] if given.kwarg else []
    return names


STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def wrong_signature(row: Row, thing: Any, method: bool) -> str | None:
    call = re.fullmatch(r"`([\w.]+\(.*\))`", row.there)
    if call is None or call[1].endswith("(...)"):
        return None
    found = [(STARS.get(one.kind, "") + one.name, one.default) for one in parameters(thing, method)]
    wanted = documented(call[1])
    at = [entry for entry in found if entry in wanted]
    if at != wanted:
        return f"documented {wanted}, here {found}"
    further = [name for name, default in found if (name, default) not in wanted and name[0] != "*"]
    required = [name for name, default in found if name in further and default is inspect.Parameter.empty]
    return f"needs {required}, too" if required else None


def wrong_option(option: str, thing: Any, method: bool) -> str | None:
    name, _, default = option.partition("=")
    found = {one.name: one for one in parameters(thing, method)}
    if name not in found:
        return f"no parameter {name!r}: {list(found)}"
    if default and found[name].default != ast.literal_eval(default):
        return f"{name} is {found[name].default!r} by default"
    return None


def wrong(row: Row) -> str | None:
    """Differences from the row."""
    match = re.fullmatch(r"([\w.]+)(?:\((.+)\))?", row.here)
    if match is None:
        return "no dotted path"
    try:
        thing, method = resolve(match[1])
    except (ImportError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    if match[2] is not None:
        return wrong_option(match[2], thing, method)
    if row.kind == "class" and "." in match[1] and not (inspect.isclass(thing) or inspect.ismodule(thing)):
        return "no class" if "main" not in match[1] else None
    return wrong_signature(row, thing, method)


@cache
def functions_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_each_documented_name_has_one_row(chapter: str) -> None:
    assert list(ROWS) == list(CHAPTERS) and sum(CHAPTERS.values()) == 412
    assert len(ROWS[chapter]) == CHAPTERS[chapter]
    assert {row.kind for row in ROWS[chapter]} <= KINDS
    names = [row.there for row in ROWS[chapter]]
    assert [name for name in names if names.count(name) > 1] == []


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_each_path_is_there_with_the_documented_signature(chapter: str) -> None:
    assert {f"{row.there}: {row.here}": said for row in ROWS[chapter] if (said := wrong(row))} == {}


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_each_row_s_test_is_there(chapter: str) -> None:
    missing = []
    for row in ROWS[chapter]:
        path, _, name = row.test.partition("::")
        if not name.startswith("test_") or not (ROOT / path).is_file() or name not in functions_in(path):
            missing.append((row.there, row.test))
    assert missing == []


@pytest.mark.parametrize("chapter", INTEGRATIONS)
def test_the_face_has_each_function_and_class(chapter: str) -> None:
    integration, different = INTEGRATIONS[chapter], []
    for row in ROWS[chapter]:
        name = re.match(r"`(\w+)(?:\(|`)", row.there)
        if row.kind in ("function", "class") and name is not None:
            thing, _ = resolve(row.here.partition("(")[0])
            if getattr(integration, name[1]) != thing:  # bound methods are equal, and not the same
                different.append(row.there)
    assert different == []
    named = " ".join(row.there for row in ROWS[chapter])
    assert [name for name in integration.__all__ if not re.search(rf"\b{name}\b", named)] == []


def test_wrong_rows_are_found() -> None:
    """Findings of the checks above for rows that are not true."""
    here = "zero_strategy.compat.megatron.models."
    for there, path, said in (
        ("`divide(numerator, denominator)`", here + "divide", None),
        ("`divide(numerator)`", here + "divide", r"needs \['denominator'\], too"),
        ("`divide(denominator, numerator)`", here + "divide", "documented"),
        ("`maybe_cat(a, b, dim=1)`", here + "maybe_cat", "documented"),
        ("dim", here + "maybe_cat(dim=0)", None),
        ("dim", here + "maybe_cat(dim=1)", "dim is 0 by default"),
        ("axis", here + "maybe_cat(axis)", "no parameter 'axis'"),
        ("gone", here + "gone", "AttributeError"),
    ):
        found = wrong(Row(there, "function", path, ""))
        assert (found is None) if said is None else (found is not None and re.search(said, found)), (there, found)
