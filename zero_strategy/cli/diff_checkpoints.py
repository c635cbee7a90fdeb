"""One checkpoint compared with another: names, shapes, dtypes, every element, and the records beside the tensors.

Tensors are read a block at a time, so that memory does not depend on their sizes. A block of ours begins and ends where
blocks of checksums do, and each is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from zero_strategy.checkpoint.layout import TensorSpec
from zero_strategy.checkpoint.manifest import FileKind
from zero_strategy.checkpoint.ranges import BLOCK_BYTES, Block
from zero_strategy.checkpoint.reader import StateReader
from zero_strategy.cli.diff_found import MODEL, Comparison, Difference, Side, is_native, tensor_difference
from zero_strategy.cli.diff_records import compare_records, layout_notes
from zero_strategy.cli.diff_slices import file_of, parts_of
from zero_strategy.cli.diff_tensors import Tally


@dataclass(frozen=True)
class _Pair:
    """Two tensors of one name.

    Attributes:
        where: "model", or "optimizer" with its number and the kind of state.
        kind: As readers know it.
        name: The name.
        a, b: Specs under the names that they are stored by; None where one side has no such tensor.
    """

    where: str
    kind: FileKind
    name: str
    a: TensorSpec | None
    b: TensorSpec | None


def bytes_to_compare(a: StateReader, b: StateReader, *, weights_only: bool = False) -> int:
    """Amount of progress that `compare` will report."""
    return sum(
        pair.a.nbytes + pair.b.nbytes
        for pair in _pairs(a, b, weights_only)
        if pair.a is not None and pair.b is not None and pair.a.shape == pair.b.shape
    )


def compare(
    a: StateReader,
    b: StateReader,
    *,
    weights_only: bool = False,
    tolerance: int = 0,
    progress: Callable[[int], object] = lambda count: None,
) -> Comparison:
    """Compares two open checkpoints, in blocks.

    Args:
        a: One.
        b: The other.
        weights_only: Leave optimizers and counters out.
        tolerance: Distance in ulps up to which floating-point numbers are equal; 0 compares bits.
        progress: Is told of the bytes read.

    Raises:
        ValueError: If one is damaged, or the tolerance is negative.
    """
    if tolerance < 0:
        raise ValueError(f"a tolerance of {tolerance} ulps: give 0, which compares bits, or more")
    found = Comparison(Side.of(a), Side.of(b), layout=list(layout_notes(a, b)))
    for pair in _pairs(a, b, weights_only):
        found.totals.setdefault(pair.where, 0)
        if pair.a is None or pair.b is None:
            spec = pair.a or pair.b
            assert spec is not None
            text = f"{str(spec.dtype).removeprefix('torch.')} {list(spec.shape)}"
            side = ("only in A", text, "") if pair.b is None else ("only in B", "", text)
            found.differences.append(Difference(pair.where, pair.name, *side))
            continue
        found.tensors += 1
        found.filled += pair.a.numel > 0
        found.totals[pair.where] += 1
        tally = _tally(pair, a, b, tolerance, progress)
        difference = tensor_difference(pair.where, pair.name, pair.a, pair.b, tally)
        if difference is not None:
            found.differences.append(difference)
            continue
        found.equal += 1
        found.near += tally is not None and tally.near > 0
    compare_records(a, b, found, weights_only=weights_only, tolerance=tolerance)
    return found


def equal_by_checksums(a: StateReader, b: StateReader, *, weights_only: bool = False) -> bool | None:
    """Compares the tensors of two checkpoints without reading them.

    Args:
        a: One.
        b: The other.
        weights_only: Leave optimizers out.

    Returns:
        Whether all are equal; None where checksums do not tell, as ranks divided tensors in another way.
    """
    unknown = False
    for pair in _pairs(a, b, weights_only):
        if pair.a is None or pair.b is None or (pair.a.dtype, pair.a.shape) != (pair.b.dtype, pair.b.shape):
            return False
        mine, theirs = _blocks(a, pair.a, pair.kind), _blocks(b, pair.b, pair.kind)
        if any(
            (block.start, block.stop) in mine and mine[block.start, block.stop] != block for block in theirs.values()
        ):
            return False
        unknown |= mine.keys() != theirs.keys() or (bool(pair.a.numel) and not mine)
    return None if unknown else True


def tensors_differ(
    a: StateReader,
    b: StateReader,
    *,
    weights_only: bool = False,
    tolerance: int = 0,
    progress: Callable[[int], object] = lambda count: None,
) -> bool:
    """True if some tensor differs; reads up to the first one that does.

    Args:
        a: One.
        b: The other.
        weights_only, tolerance, progress: See `compare`.

    Raises:
        ValueError: If one is damaged.
    """
    for pair in _pairs(a, b, weights_only):
        if pair.a is None or pair.b is None or (pair.a.dtype, pair.a.shape) != (pair.b.dtype, pair.b.shape):
            return True
        tally = _tally(pair, a, b, tolerance, progress)
        if tally is None or tally.elements:
            return True
    return False


def _blocks(reader: StateReader, spec: TensorSpec, kind: FileKind) -> Mapping[tuple[int, int], Block]:
    if not is_native(reader):
        return {}
    found = reader.manifest.checksums.tensors.get(file_of(reader.manifest, spec.name, kind), {}).get(spec.name, [])
    return {(block.start, block.stop): block for block in found}


def _tally(
    pair: _Pair, a: StateReader, b: StateReader, tolerance: int, progress: Callable[[int], object]
) -> Tally | None:
    """Differences of two tensors; None if their shapes differ."""
    mine, theirs = pair.a, pair.b
    assert mine is not None and theirs is not None
    if mine.shape != theirs.shape:
        return None
    parts = parts_of(a, mine, pair.kind), parts_of(b, theirs, pair.kind)
    tally = Tally(mine.shape, parts, tolerance)
    # A multiple of the blocks of either, which are of so many bytes.
    block = BLOCK_BYTES // min(mine.dtype.itemsize, theirs.dtype.itemsize)
    for start in range(0, mine.numel, block):
        stop = min(start + block, mine.numel)
        x, y = a.read(mine.name, start, stop, kind=pair.kind), b.read(theirs.name, start, stop, kind=pair.kind)
        tally.add(start, x, y)
        progress(x.nbytes + y.nbytes)
    return tally


def _pairs(a: StateReader, b: StateReader, weights_only: bool) -> Iterator[_Pair]:
    """All tensors, those of the model first, in the order of the module among those of one size of elements."""
    seen: set[tuple[str, str]] = set()
    for name in dict.fromkeys([*_in_order(a), *_in_order(b)]):
        mine, theirs = (_weight(reader, name) for reader in (a, b))
        if mine is not None and theirs is not None:
            # A tied tensor that the two store under two of its names comes once.
            if (mine.name, theirs.name) in seen:
                continue
            seen.add((mine.name, theirs.name))
        yield _Pair(MODEL, "model", name, mine, theirs)
    if weights_only:
        return
    order = {name: number for number, name in enumerate(dict.fromkeys([*_in_order(a), *_in_order(b)]))}
    optimizers = [sorted(_optimizers(reader), key=lambda name: (len(name), name)) for reader in (a, b)]
    for optimizer in dict.fromkeys([*optimizers[0], *optimizers[1]]):
        states = [
            reader.states(optimizer) if optimizer in known else {}
            for reader, known in zip((a, b), optimizers, strict=True)
        ]
        for kind in dict.fromkeys([*states[0], *states[1]]):
            specs_a, specs_b = (each.get(kind, {}) for each in states)
            names = dict.fromkeys([*specs_a, *specs_b])
            for name in sorted(names, key=lambda name: order.get(name, len(order))):
                where = f"optimizer {optimizer} {kind}"
                yield _Pair(where, (optimizer, kind), name, specs_a.get(name), specs_b.get(name))


def _in_order(reader: StateReader) -> list[str]:
    """Names of weights as the manifest has them; the reader's are file by file."""
    return list(reader.manifest.weights if reader.has_manifest else reader.weights)


def _weight(reader: StateReader, name: str) -> TensorSpec | None:
    return reader.weights.get(reader.stored_name(name, reader.weights))


def _optimizers(reader: StateReader) -> Mapping[str, object]:
    return reader.manifest.optimizers if reader.has_manifest else {}
