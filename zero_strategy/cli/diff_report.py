"""Differences of two checkpoints in words, the most important first, and what their pattern says in one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from zero_strategy.checkpoint.manifest import AVERAGE
from zero_strategy.cli.diff_found import MODEL, STEP, Comparison, Difference, Side
from zero_strategy.cli.diff_tensors import Element, Hit, Places
from zero_strategy.runtime.shown import brief

MOST = 10
"""Differences of a kind that are told unless all are asked for."""
_FEW_ULPS = 16
"""Another order of the sums of one step explains so much."""
_SETTINGS = ("groups", "random state", "loss scale", "user", "files")
_UNCOMPILED = "_orig_mod."


def report(found: Comparison, *, everything: bool = False, from_first_step: bool = False) -> Iterator[str]:
    """Lines on a comparison.

    Args:
        found: All differences.
        everything: All of them, where otherwise the first ten of each kind are told.
        from_first_step: The two are the first that two runs have in common.
    """
    most = len(found.differences) if everything else MOST
    yield conclusion(found, from_first_step=from_first_step)
    yield ""
    yield f"A: {_side(found.a)}"
    yield f"B: {_side(found.b)}"
    for title, lines in (
        ("trained, set or saved differently", list(_records(found.of_records))),
        ("names, shapes and dtypes", [_structure(each) for each in found.of_tensors if each.what != "values"]),
    ):
        yield from _listed(title, [[line] for line in lines], most)
    for where, total in found.totals.items():
        entries = [each for each in found.of_tensors if each.where == where and each.places is not None]
        title = f"{_named(where)}: {len(entries)} of {total} tensors have other values"
        yield from _listed(title, [list(_values(each)) for each in entries], most)
    yield from _listed("not counted as a difference", [[each] for each in found.layout], len(found.layout))
    yield ""
    near = f" ({found.near} of them by the tolerance)" if found.near else ""
    count = f"{len(found.differences)} difference(s)"
    yield f"{found.equal} of {found.tensors} tensors in both are equal{near}; {count}"


def as_json(found: Comparison, *, from_first_step: bool = False) -> dict[str, Any]:
    """A comparison for programs; infinities as texts."""
    return {
        "conclusion": conclusion(found, from_first_step=from_first_step),
        "a": _side_as_json(found.a),
        "b": _side_as_json(found.b),
        "tensors": found.tensors,
        "equal": found.equal,
        "equal_by_tolerance": found.near,
        "differences": [_finite(asdict(entry)) for entry in found.differences],
        "layout": list(found.layout),
    }


def _side_as_json(side: Side) -> dict[str, Any]:
    return {"path": side.path, "step": side.step, "world_size": side.world_size, "stage": side.stage}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value


# ---- the sentence ----


def conclusion(found: Comparison, *, from_first_step: bool = False) -> str:
    """One sentence that says what the differences have in common."""
    if not found.differences:
        near = f" ({found.near} of them within the tolerance)" if found.near else ""
        saved = ", though they were saved in different ways" if found.layout else ""
        return f"The two are equal, in {_tensors(found.tensors)}{near} and all records{saved}."
    if (steps := (found.a.step, found.b.step))[0] != steps[1] and None not in steps:
        what = "so they are expected to differ: compare equal steps, or the folders of both runs"
        if not found.of_tensors:
            what = "and no tensor differs: nothing was trained in between"
        return f"A is of step {brief(steps[0])} and B of step {brief(steps[1])}, {what}."
    if not found.of_tensors:
        return f"No tensor differs; different: {_areas(found.of_records)}."
    settings = [each for each in found.of_records if any(word in each.where for word in _SETTINGS)]
    too = f"; also different: {_areas(settings)}" if settings else ""
    return f"{_of_structure(found) or _of_values(found, from_first_step)}{too}."


def _of_structure(found: Comparison) -> str:
    """A sentence without its end on names, shapes and dtypes; empty where values differ, too."""
    others = [each for each in found.of_tensors if each.what != "values"]
    weights = [each for each in others if each.where == MODEL]
    if not found.totals.get(MODEL) and weights:
        return "The two have no name of a weight in common: they are of different models"
    if renamed := _compiled(weights):
        return f"Names of {renamed} weight(s) differ by torch.compile's `{_UNCOMPILED}`: one model was compiled"
    if len(others) < len(found.of_tensors) or any(each.elements for each in others):
        return ""
    if all(each.what == "dtype" for each in others):
        return f"All values are equal; only dtypes of {_tensors(len(others))} differ"
    kinds = {each.what for each in others}
    if len(kinds) == 1 and kinds <= {"only in A", "only in B"}:
        side, names = "A" if "only in A" in kinds else "B", dict.fromkeys(each.name for each in others)
        what = f"{_kinds(others)} of " if not weights else ""
        return f"Only {side} has {what}{_some(names)}; all that both have is equal"
    return f"All values that can be compared are equal; {len(others)} name(s), shape(s) or dtype(s) differ"


def _compiled(weights: Sequence[Difference]) -> int:
    sides = [{e.name.replace(_UNCOMPILED, "") for e in weights if e.what == f"only in {side}"} for side in "AB"]
    return len(sides[0]) if sides[0] and sides[0] == sides[1] and len(weights) == 2 * len(sides[0]) else 0


def _of_values(found: Comparison, from_first_step: bool) -> str:
    """A sentence without its end on values that differ."""
    values = [each for each in found.of_tensors if each.places is not None]
    if not values:
        return f"{len(found.of_tensors)} name(s), shape(s) or dtype(s) of tensors differ"
    if pattern_found := _of_nan(values) or _of_one_tensor(values) or _of_one_slice(values):
        return pattern_found
    if all(each.what == "dtype" for each in values):
        largest = max(each.max_abs for each in values)
        return f"Only {_tensors(len(values))} of other dtypes differ, by {largest:.3g} at most, which rounding may give"
    amount = _rounding(values)
    # Tensors without elements are never different.
    if 1 < len(values) >= 0.9 * found.filled and not amount:
        since = " from the first common step on" if from_first_step else ""
        what = "Everything" if len(values) == found.filled else "Nearly everything"
        return f"{what} differs{since} ({len(values)} of {found.tensors} tensors): other data, another seed or settings"
    return _of_kinds(found, values, amount)


def _of_nan(values: Sequence[Difference]) -> str:
    """Part of a sentence, where one of the two is NaN; empty elsewhere."""
    found = [(each, each.places) for each in values if each.places is not None and each.places.first_nan is not None]
    if not found:
        return ""
    sides = [sum(places.nan_a for _, places in found), sum(places.nan_b for _, places in found)]
    who = "Each has NaN where the other has not" if all(sides) else f"Only {'A' if sides[0] else 'B'} has NaN"
    entry, places = found[0]
    assert places.first_nan is not None
    names = _some([_full(each) for each, _ in found])
    return f"{who}, in {names}; the first is element {places.first_nan.index} of {_full(entry)}"


def _of_one_tensor(values: Sequence[Difference]) -> str:
    """Part of a sentence, where one element, or elements in one line of one tensor, differ; empty elsewhere."""
    first = values[0]
    if len(values) > 1 or first.places is None:
        return ""
    if first.elements == 1:
        return f"One element alone differs: {_element(_full(first), first.places.first)}"
    lines = ", ".join(_lines(first, first.places))
    return f"All {first.elements} elements that differ are in {lines} of {_full(first)}" if lines else ""


def _of_one_slice(values: Sequence[Difference]) -> str:
    """Part of a sentence, where all that differs is most of what one rank wrote; empty elsewhere."""
    places = [each.places for each in values if each.places is not None]
    advice = "a wrong reduction there, or a shard that was not updated"
    for side in ("B", "A"):
        hits = [place.hits_b if side == "B" else place.hits_a for place in places]
        # Tensors that one rank wrote as a whole fit any other's slice where nothing tells whose they are.
        whole = [place.first.part_b if side == "B" else place.first.part_a for place in places]
        parts = [
            of[0].part if len(of) == 1 else part if part and part.count == 1 and not of else None
            for of, part in zip(hits, whole, strict=True)
        ]
        known = [part for part in parts if part is not None]
        writers = {part.rank: part.writer for part in known if part.rank is not None}
        if len(known) < len(values) or 2 * sum(each.elements for each in values) < sum(part.numel for part in known):
            continue
        if len(values) == 1 and hits[0]:
            return f"All that differs in {_full(values[0])}: {_much(hits[0][0])}, in {side}: {advice}"
        if len(values) > 1 and len(writers) == 1 and (any(hits) or all(part.of_several for part in known)):
            certain = all(part.rank is not None for part in known)
            whose = (
                f"{'was' if certain else 'was, or may have been,'} written by {next(iter(writers.values()))} in {side}"
            )
            return f"All that differs, in {_tensors(len(values))}, {whose}: {advice}"
    return ""


def _of_kinds(found: Comparison, values: Sequence[Difference], amount: str) -> str:
    counts = f"in {len(values)} of {found.tensors} tensors{amount}"
    states = {each.where for each in values}
    if MODEL not in states and found.totals.get(MODEL):
        if all(where.endswith(f" {AVERAGE}") for where in states):
            return f"Only running averages differ, {counts}; weights and the rest of the optimizer state are equal"
        return f"Only {_kinds(values)} differs, {counts}; all {found.totals[MODEL]} weights are equal"
    if states == {MODEL}:
        trained = found.a.trained | found.b.trained
        if trained and not any(each.name in trained for each in values):
            return f"Only weights that no optimizer trains (buffers, frozen ones) differ, {counts}"
        if len(found.totals) > 1:
            return f"Only weights differ, {counts}; optimizer states are equal"
    return f"Values differ {counts}; the first is {_full(values[0])}"


def _rounding(values: Sequence[Difference]) -> str:
    ulps = [each.places.max_ulps for each in values if each.places is not None and each.what == "values"]
    known = [each for each in ulps if each is not None]
    if len(known) < len(values) or max(known) > _FEW_ULPS:
        return ""
    if max(known) == 0:
        return ", in signs of zeros alone"
    return f", by {_ulps(max(known))} at most (as another order of sums gives: other ranks, another device)"


def _ulps(count: int) -> str:
    return "1 ulp" if count == 1 else f"{count} ulps"


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"


def _areas(records: Sequence[Difference]) -> str:
    """Places of records, each once."""
    return _some(dict.fromkeys(map(_area, records)))


def _area(each: Difference) -> str:
    inner = each.name.partition(".")[2]
    if _is_group(each) and inner:
        return f"{inner} of {_place(each)}"
    return f"the file {each.name}" if each.where == "files" else _place(each)


def _is_group(each: Difference) -> bool:
    return each.where.startswith("optimizer ") and each.where.endswith(" groups")


def _place(each: Difference) -> str:
    """Place of a record, in words."""
    if _is_group(each):
        return f"{each.where.removesuffix(' groups')} group {each.name.partition('.')[0]}"
    return each.where


def _kinds(entries: Sequence[Difference]) -> str:
    """Kinds of optimizer state in words: "optimizer state (exp_avg, exp_avg_sq)"."""
    kinds = dict.fromkeys(each.where.split(" ", 2)[2] for each in entries if each.where.startswith("optimizer "))
    return f"optimizer state ({', '.join(kinds)})"


def _some(names: Iterable[str], most: int = 3) -> str:
    found = list(names)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def _full(entry: Difference) -> str:
    return entry.name if entry.where == MODEL else f"{entry.where} of {entry.name}"


# ---- the lines ----


def _side(side: Side) -> str:
    saved = "" if side.world_size is None else f"saved by {side.world_size} rank(s) at stage {side.stage}"
    facts = [f"step {brief(side.step)}" if side.step is not None else "", saved, "in pieces" if side.pieces else ""]
    known = ", ".join(filter(None, facts))
    return f"{side.path} ({known})" if known else side.path


def _listed(title: str, entries: Sequence[Sequence[str]], most: int) -> Iterator[str]:
    if not entries:
        return
    yield ""
    yield title
    for lines in entries[:most]:
        yield from (f"  {line}" for line in lines)
    if len(entries) > most:
        yield f"  and {len(entries) - most} more: --all tells of them"


def _named(where: str) -> str:
    return "weights and buffers" if where == MODEL else where


def _records(records: Sequence[Difference]) -> Iterator[str]:
    """A line for each record; those that many parameters or ranks have alike are one line."""
    groups: dict[tuple[str, ...], list[Difference]] = {}
    # How far they had come is the first that one wants to know.
    for each in sorted(records, key=lambda each: (each.name != STEP, each.where == "user")):
        key: tuple[str, ...] = (each.where, each.name, each.what)
        if each.where.startswith("random state of rank "):
            key = ("random state", each.name, each.what)
        elif each.where.startswith("optimizer ") and each.where.endswith(" numbers"):
            key = (each.where, each.name.rpartition(".")[2], each.what, each.a, each.b)
        groups.setdefault(key, []).append(each)
    for alike in groups.values():
        yield from _record(alike)


def _record(alike: Sequence[Difference]) -> Iterator[str]:
    each = alike[0]
    inner = each.name.partition(".")[2] if _is_group(each) else each.name
    name = f"{_place(each)}: {inner}" if inner else _place(each)
    others = f" (and {len(alike) - 1} more alike)" if len(alike) > 1 else ""
    entries = f" (the first of {each.elements} of {each.numel} entries)" if each.what == "record" and each.numel else ""
    if each.what in ("only in A", "only in B"):
        value = each.a or each.b
        yield f"{name} is {each.what}{f': {value}' if value else ''}{others}"
    elif each.places is not None:
        first, *rest = _values(each)
        yield from (f"{each.where}: {first}", *rest)
    else:
        yield f"{name} is {each.a} in A and {each.b} in B{entries}{others}"


def _structure(each: Difference) -> str:
    name = f"{_named(each.where)}: {each.name}"
    if each.what in ("only in A", "only in B"):
        return f"{name} is {each.what}: {each.a or each.b}"
    same = "" if each.what != "dtype" or each.elements else "; its values are equal"
    return f"{name} has the {each.what} {each.a} in A and {each.b} in B{same}"


def _values(each: Difference) -> Iterator[str]:
    places = each.places
    assert places is not None
    ulps = "" if places.max_ulps is None else f", {_ulps(places.max_ulps)}"
    amount = f"by up to {each.max_abs:.6g} ({each.max_rel:.3g} of the larger one{ulps})"
    amount = amount if math.isfinite(each.max_abs) else "some by what is not finite"
    yield f"{each.name}: {each.elements} of {each.numel} elements differ ({_percent(each)}), {amount}"
    yield f"  first: {_element('', places.first)}"
    if writers := _writers(places.first):
        yield f"  written by {writers}"
    yield f"  pattern: {pattern(each)}"
    if places.nan_a or places.nan_b:
        assert places.first_nan is not None
        yield f"  NaN: {places.nan_a} in A alone, {places.nan_b} in B alone; first: {_element('', places.first_nan)}"


def _percent(each: Difference) -> str:
    share = 100 * each.elements / each.numel
    return f"{share:.3g} %" if each.elements < each.numel else "100 %"


def _element(name: str, element: Element) -> str:
    where = f"element {element.index}"
    where += f" of {name}" if name else ""
    where += f" at {list(element.position)}" if len(element.position) > 1 else ""
    apart = "" if element.ulps is None else f", {_ulps(element.ulps)} apart"
    apart = ", zeros of two signs" if element.ulps == 0 else apart
    a, b = (_valued(*pair) for pair in ((element.a, element.bits_a), (element.b, element.bits_b)))
    return f"{where}: {a} in A, {b} in B{apart}"


def _valued(value: str, bits: str) -> str:
    return bits if value == bits else f"{value} ({bits})"


def _writers(element: Element) -> str:
    told = {
        side: f"{part.writer}, elements {part.start} to {part.stop - 1}" if part.count > 1 else part.writer
        for side, part in (("A", element.part_a), ("B", element.part_b))
        if part is not None
    }
    if len(set(told.values())) == 1 and len(told) == 2:
        return f"{told['A']}, in A and B"
    return "; ".join(f"{part}, in {side}" for side, part in told.items())


def pattern(each: Difference) -> str:
    """A phrase on the elements of a tensor that differ: which of them, and whose."""
    places = each.places
    assert places is not None
    if each.elements == each.numel:
        return "every element"
    if each.elements == 1:
        return "one element"
    found = _slices(places)
    if lines := ", ".join(_lines(each, places)):
        found.append(f"all in {lines}")
    span = f"{places.start} to {places.stop - 1}"
    gapless = places.stop - places.start == each.elements
    found.append(f"elements {span} without a gap" if gapless else f"scattered from element {span}")
    return "; ".join(found)


def _slices(places: Places) -> list[str]:
    """Phrases on the slices that have all that differs, where they are few."""
    told: dict[str, list[str]] = {}
    for side, hits in (("A", places.hits_a), ("B", places.hits_b)):
        if hits:
            few = " and ".join(_much(hit) for hit in hits) if len(hits) <= 3 else f"in slices of {len(hits)} ranks"
            told.setdefault(few, []).append(side)
    return [f"{few}, in {' and '.join(sides)}" for few, sides in told.items()]


def _much(hit: Hit) -> str:
    part = hit.part
    much = f"all {part.numel}" if hit.whole else f"{hit.elements} of the {part.numel}"
    return f"{much} elements from {part.start} to {part.stop - 1}, which {part.writer} wrote"


def _lines(each: Difference, places: Places) -> Iterator[str]:
    """Rows, columns and the like that have all elements that differ."""
    dimensions = len(places.first.position)
    if each.elements == 1 or dimensions < 2:
        return
    for dimension, index in places.fixed.items():
        line = {0: "row", 1: "column"}[dimension] if dimensions == 2 else f"dimension {dimension}, index"
        yield f"{line} {index}"
