"""How a key of DeepSpeed's JSON is described: its type, DeepSpeed's default, and what becomes of it here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TRANSLATED = "translated"
WITHOUT_EFFECT = "accepted without effect"
REJECTED = "rejected"

BOOL, INT, NUMBER, TEXT, LIST, MAPPING, ANY = "bool", "int", "number", "str", "list", "mapping", "any"
FLAG = "bool, 0 or 1"

Kind = str | tuple[str, ...]
"""One of the names above, or the words that are accepted, in any case of letters."""


@dataclass(frozen=True)
class Key:
    """One key with a value of its own."""

    kind: Kind
    """What its value is."""
    verdict: str
    """What becomes of it. A rejected key is still accepted at its default, which asks for nothing."""
    default: Any
    """DeepSpeed's default in the version that `DEFAULTS_VERSION` names; None is also accepted then."""
    note: str = ""
    """Why nothing is lost, or why it is rejected and what to use instead."""
    ours: str = ""
    """The setting that it is translated to."""
    auto: bool = False
    """Whether ``"auto"`` is accepted: the framework decides."""


@dataclass(frozen=True)
class Group:
    """A key whose value is a mapping."""

    keys: Mapping[str, Key | Group]
    """What is known in it."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Other names of its keys: deprecated ones, and those that DeepSpeed accepts as well."""
    switch: str = ""
    """The key that turns the group on. While that has its default, nothing in the group has an effect."""
    note: str = ""
    """Why a group that is turned on is rejected; empty if it is not."""
    open: bool = False
    """True where DeepSpeed itself does not say which keys there are."""
    truth: str = ""
    """The key that true or false in place of the mapping sets, to 1 or 0: an old form of `zero_optimization`."""


def translated(kind: Kind, default: Any, ours: str, note: str = "", *, auto: bool = False) -> Key:
    """A key that has a counterpart here."""
    return Key(kind, TRANSLATED, default, note, ours, auto)


def unneeded(kind: Kind, default: Any, why: str, *, auto: bool = False) -> Key:
    """A key that nothing is lost without."""
    return Key(kind, WITHOUT_EFFECT, default, why, "", auto)


def refused(kind: Kind, default: Any, why: str, *, auto: bool = False) -> Key:
    """A key that asks for what is not here, unless it has its default."""
    return Key(kind, REJECTED, default, why, "", auto)


def switched(
    why: str, keys: Mapping[str, Key | Group] | None = None, *, open: bool = False, auto: bool = False
) -> Group:
    """A group with the switch ``enabled`` that is rejected when turned on; by default it is off."""
    switch = refused(BOOL, False, why, auto=auto)
    return Group({"enabled": switch, **(keys or {})}, switch="enabled", note=why, open=open)


def carried_out(what: str, keys: Mapping[str, Key | Group]) -> Group:
    """A group with the switch ``enabled`` that is carried out when turned on; by default it is off."""
    return Group({"enabled": translated(BOOL, False, what), **keys}, switch="enabled")


def plain_keys(names: str, why: str) -> dict[str, Key | Group]:
    """Keys of any type, separated by blanks, that have an effect only through the group's switch."""
    return {name: unneeded(ANY, None, why) for name in names.split()}
