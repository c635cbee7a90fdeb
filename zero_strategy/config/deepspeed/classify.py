"""A walk over a DeepSpeed JSON: each key is looked up, checked and reported; and where the JSON is read from.

A source is a mapping, a file that may have comments, or base64 as DeepSpeed's launcher passes it.

Every key is looked up, checked, and reported with what becomes of it.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import errno
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zero_strategy.config.bounds import MOST_BYTES, check_values
from zero_strategy.config.deepspeed.keys import (
    ANY,
    BOOL,
    FLAG,
    INT,
    LIST,
    MAPPING,
    NUMBER,
    REJECTED,
    ROOT,
    TEXT,
    TRANSLATED,
    WITHOUT_EFFECT,
    Group,
    Key,
)
from zero_strategy.config.section import from_origin, wrong_type
from zero_strategy.config.sources import Layer, read_file, read_mapping
from zero_strategy.runtime.regular_files import read_text
from zero_strategy.runtime.shown import shown as on_one_line

# Strings come first in both patterns, so that nothing inside of one is taken for a comment or a comma.
_STRING = r'"(?:\\.|[^"\\\n])*"'
_COMMENTS = re.compile(_STRING + r"|(?://|#)[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMAS = re.compile(_STRING + r"|,(?=\s*[}\]])")
_MAY_BE_INFINITE = ("steps_per_print",)


class _Constant(float):
    """A number that only Python's JSON writes: Infinity, -Infinity, NaN."""


def read_source(source: Mapping[str, Any] | str | os.PathLike[str]) -> Layer:
    """Reads a DeepSpeed config from wherever it is.

    Args:
        source: A mapping (a DictConfig too), the path of a JSON or YAML file, or base64 of JSON text.

    Raises:
        FileNotFoundError: If it is neither base64 nor an existing file.
        TypeError: If it is something else, or holds something other than a mapping.
        ValueError: If the text cannot be read, or has a key twice.
    """
    if isinstance(source, Mapping):
        return read_mapping(source)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(wrong_type("config", source, "a mapping, the path of a JSON file or base64 of JSON", None))
    encoded = read_base64(source)
    if encoded is not None:
        return encoded
    path = Path(source).expanduser()
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, "no DeepSpeed config file (and not base64 of one)", os.fspath(source))
    return read_file(source) if path.suffix in (".yaml", ".yml") else read_json_file(source)


def read_json_file(source: str | os.PathLike[str]) -> Layer:
    """Makes a layer of a JSON file, in which comments and trailing commas are allowed."""
    name = on_one_line(source)
    text = read_text(Path(source).expanduser(), MOST_BYTES)
    return Layer(parse_json(text, f"the config file {name}"), f"user: {name}")


def read_base64(source: str | os.PathLike[str]) -> Layer | None:
    """Makes a layer of base64 of a JSON object, either alphabet; None if the text is something else."""
    if not isinstance(source, str) or not re.fullmatch(r"[A-Za-z0-9+/_-]{4,}={0,2}\s*", source):
        return None
    try:
        text = base64.b64decode(source.strip().translate(str.maketrans("-_", "+/")), validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return None
    # Any word of the right length is base64 of something; a config begins with a brace.
    if not text.lstrip().startswith("{"):
        return None
    return Layer(parse_json(text, "the base64 config"), "user: base64")


def parse_json(text: str, source: str) -> dict[str, Any]:
    """Parses JSON with ``//``, ``#`` and ``/* */`` comments and trailing commas.

    Raises:
        TypeError: If it is no object.
        ValueError: If it is no such JSON, a key appears twice in one object, or it is larger than a config can be;
            `source` names the text.
    """
    bare = _TRAILING_COMMAS.sub(_keep_strings, _COMMENTS.sub(_keep_strings, text))
    try:
        values = json.loads(bare, object_pairs_hook=_unique, parse_constant=_Constant)
    except json.JSONDecodeError as error:
        hint = "; HJSON beyond comments and trailing commas (such as names without quotes) is not read"
        raise ValueError(f"{source} cannot be read as JSON: {error}{hint}") from error
    except RecursionError:
        raise ValueError(f"{source} cannot be read as JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    if not isinstance(values, dict):
        raise TypeError(f"{source} holds a {type(values).__name__}; expected a mapping of settings")
    check_values(values, source)
    return values


def _keep_strings(match: re.Match[str]) -> str:
    # What is taken out leaves its line breaks, and blanks for the rest: positions in errors are those of the file.
    found = match.group()
    return found if found.startswith('"') else re.sub(r"[^\n]", " ", found)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            both = f"{values[name]!r} and {value!r}"
            raise ValueError(f"the key '{name}' is there twice in one section ({both}); keep one")
        if name in _MAY_BE_INFINITE and isinstance(value, _Constant) and value > 0:
            value = float(value)
        _check_finite(value)
        values[name] = value
    return values


def _check_finite(value: Any) -> None:
    if isinstance(value, _Constant):
        name = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        raise ValueError(f"{name} is no JSON number; write a finite one")
    for inner in value if isinstance(value, list) else ():
        _check_finite(inner)


AUTO = "auto"

_SIMILAR, _SIMILAR_OF_MANY, _ALIKE, _LONG = 0.6, 0.68, 0.85, 6
"""How similar names are that stand for each other in one section, at the top level, which has the most keys, and in
different sections, where they have so many letters: short names are similar to most."""


class KeyReport(NamedTuple):
    """One key of a file, and what becomes of it."""

    path: str
    """The key as it is spelled in the file, dotted."""
    value: Any
    """Its value; whole numbers such as 5e8 as int."""
    classification: str
    """``translated``, ``accepted without effect`` or ``rejected``."""
    note: str
    """Why nothing is lost, why it is rejected and what to use instead, or how it is translated."""
    ours: str
    """What it is translated to; empty if it is not."""
    key: str
    """The key's present spelling, dotted."""
    idle: bool = False
    """True for a key that asks for nothing: it has DeepSpeed's default, or its section is off."""


def classify(layer: Layer) -> dict[str, KeyReport]:
    """Reports on every key of a config.

    Returns:
        Reports by the key's present spelling, in the order of the file. Sections have none of their own.

    Raises:
        TypeError: If a value is not of its key's type.
        ValueError: If a key is unknown or given in two spellings, a value is not accepted, or ``"auto"`` stands where
            no framework decides.
    """
    reports: dict[str, KeyReport] = {}
    for report in _walk(layer.values, ROOT, "", "", layer.origin, _Around()):
        other = reports.get(report.key)
        if other is not None:
            raise ValueError(f"'{other.path}' and '{report.path}'{from_origin(layer.origin)} are one key; keep one")
        reports[report.key] = report
    return reports


class _Around(NamedTuple):
    """Text of the section above about a key."""

    off: str = ""
    """Why nothing in the section has an effect."""
    refused: str = ""
    """Why the whole section is rejected."""


def _walk(
    values: Mapping[Any, Any], group: Group, shown: str, path: str, origin: str, around: _Around
) -> Iterator[KeyReport]:
    around = _around(values, group, path, origin, around)
    for name, value in values.items():
        if not isinstance(name, str):
            raise TypeError(wrong_type(f"a key of '{shown[:-1]}'" if shown else "a key", name, "str", origin))
        present = group.spellings.get(name, name)
        key = group.keys.get(present)
        place, canonical = shown + name, path + present
        if key is None and group.open:
            key = Key(ANY, WITHOUT_EFFECT, None, group.note)
        if key is None and name.startswith("_"):
            yield KeyReport(
                place, value, WITHOUT_EFFECT, "a key that begins with '_' is a comment", "", canonical, True
            )
            continue
        if key is None and not shown and not _meant(group, shown, name):  # DeepSpeed does not look for such either
            note = "DeepSpeed has no such key, and reads it nowhere"
            yield KeyReport(place, value, WITHOUT_EFFECT, note, "", canonical)
            continue
        if key is None:
            raise ValueError(_unknown(group, shown, name, origin))
        if isinstance(key, Group):
            if value is None:
                yield KeyReport(place, None, WITHOUT_EFFECT, "null asks for nothing", "", canonical, True)
            elif isinstance(value, bool) and key.truth:
                inner = key.keys[key.truth]
                assert isinstance(inner, Key)
                note = f"{'true' if value else 'false'} is an old form of {{{key.truth!r}: {int(value)}}}"
                yield KeyReport(place, int(value), inner.verdict, note, inner.ours, f"{canonical}.{key.truth}")
            elif not isinstance(value, Mapping):
                expected = f"a mapping with keys among {', '.join(key.keys)}"
                raise TypeError(wrong_type(place, value, expected, origin))
            else:
                yield from _walk(value, key, place + ".", canonical + ".", origin, around)
        else:
            yield _report(place, canonical, value, key, origin, around if key.switched else _Around())


def _around(values: Mapping[Any, Any], group: Group, path: str, origin: str, around: _Around) -> _Around:
    if not group.switch or around != _Around():
        return around
    switch = group.keys[group.switch]
    assert isinstance(switch, Key)
    value = values.get(group.switch, switch.default)
    if not _asks_for_nothing(_checked(path + group.switch, value, switch, origin), switch):
        return _Around(refused=group.note)
    return _Around(off=f"the section is off: '{path}{group.switch}' is {value!r}")


def _report(place: str, canonical: str, value: Any, key: Key, origin: str, around: _Around) -> KeyReport:
    value = _checked(place, value, key, origin)
    if around.refused:
        # The switch carries the reason, so that it is said once.
        part = key.verdict != REJECTED
        note = f"part of '{place.rpartition('.')[0]}', which is rejected" if part else around.refused
        return KeyReport(place, value, REJECTED, note, "", canonical, part)
    if around.off:
        return KeyReport(place, value, WITHOUT_EFFECT, around.off, "", canonical, True)
    if key.verdict == REJECTED and _asks_for_nothing(value, key):
        note = "auto: nothing is asked for" if value == AUTO else "DeepSpeed's default, which asks for nothing"
        return KeyReport(place, value, WITHOUT_EFFECT, note, "", canonical, True)
    if value == AUTO and key.ours:
        return KeyReport(place, value, TRANSLATED, "auto: the framework decides", key.ours, canonical)
    idle = key.verdict == WITHOUT_EFFECT and value == key.default and key.kind != ANY
    return KeyReport(place, value, key.verdict, key.note, key.ours, canonical, idle)


def _asks_for_nothing(value: Any, key: Key) -> bool:
    off = (None, key.default, AUTO) if key.auto else (None, key.default)
    return value in off or (key.kind == MAPPING and not value)


def _checked(place: str, value: Any, key: Key, origin: str) -> Any:
    """The value, checked against its key; words in the case of letters that the table has."""
    if key.kind == ANY or (value is None and key.default in (None, False)):
        return value
    if value == AUTO and isinstance(value, str):
        if key.auto:
            return value
        raise ValueError(
            f"{place} is 'auto'{from_origin(origin)}, but no framework decides it; accepted: {_expected(key)}, "
            "or leave the key out"
        )
    if isinstance(key.kind, tuple):
        words = {word.lower(): word for word in key.kind}
        if not isinstance(value, str):
            raise TypeError(wrong_type(place, value, _expected(key), origin))
        if value.lower() not in words:
            raise ValueError(f"{place} is {value!r}{from_origin(origin)}; accepted: {_expected(key)}")
        return words[value.lower()]
    if key.kind == INT and isinstance(value, float) and value.is_integer():
        return int(value)  # 5e8
    if not _is_kind(value, key.kind):
        raise TypeError(wrong_type(place, value, _expected(key), origin))
    return bool(value) if key.kind == FLAG else value


def _is_kind(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind in (BOOL, FLAG)
    if kind == FLAG:
        return isinstance(value, int) and value in (0, 1)
    types: dict[str, Any] = {INT: int, NUMBER: (int, float), TEXT: str, LIST: list, MAPPING: Mapping, BOOL: bool}
    return isinstance(value, types[kind])


def _expected(key: Key) -> str:
    expected = ", ".join(map(repr, key.kind)) if isinstance(key.kind, tuple) else key.kind
    return f"{expected} or 'auto'" if key.auto else expected


def _unknown(group: Group, shown: str, name: str, origin: str) -> str:
    where = f"unknown key '{shown}{on_one_line(name)}'{from_origin(origin)} in DeepSpeed's JSON"
    meant = _meant(group, shown, name)
    if meant:
        return f"{where}; did you mean {' or '.join(map(repr, meant))}?"
    place = f"'{shown[:-1]}'" if shown else "the top level"
    return f"{where}; {place} has: {', '.join(group.keys)}"


def _meant(group: Group, shown: str, name: str) -> list[str]:
    """Keys that an unknown one may be: of a similar name here, of this name in other sections, or of a similar one."""
    elsewhere: dict[str, list[str]] = {}
    for path in _useful(ROOT, ""):
        elsewhere.setdefault(path.rpartition(".")[2], []).append(path)
    near = [] if name in elsewhere and not shown else [*group.keys, *group.spellings]  # a section is easily left out
    near = difflib.get_close_matches(name, near, n=1, cutoff=_SIMILAR if shown else _SIMILAR_OF_MANY)
    if near:
        return [shown + near[0]]
    near = [name] if name in elsewhere else []
    if len(name) >= _LONG:
        near = near or difflib.get_close_matches(name, elsewhere, n=1, cutoff=_ALIKE)
    found = elsewhere[near[0]] if near else []
    return found if len(found) <= 2 else []  # a name such as "enabled" says nothing of its section


def _useful(group: Group, prefix: str) -> Iterator[str]:
    """Paths of all keys that are not rejected."""
    for name, key in group.keys.items():
        if isinstance(key, Group):
            if not key.note:
                yield prefix + name
                yield from _useful(key, f"{prefix}{name}.")
        elif key.verdict != REJECTED:
            yield prefix + name
