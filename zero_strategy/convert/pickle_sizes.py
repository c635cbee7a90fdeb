"""Sizes of what a pickle builds, found from its opcodes before any is run.

A pickle of a hundred bytes can build a tuple that holds another one twice, which holds a third one twice, and so on:
to hash it as a key, to print it or to walk over it takes longer than anybody waits. Python's machine hashes keys as it
goes, so they are counted beforehand.
"""

from __future__ import annotations

import pickletools
from typing import Any

MOST_HASHED = 10_000_000
"""Objects in keys and members of sets, each counted as often as it is reached, beside ten for each byte."""

_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_KEYED = {"SETITEMS", "DICT"}
_HASHING = {"ADDITEMS", "FROZENSET"}
_MARK: list[int] = []
_PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}


class PickleSizes:
    """A stack of sizes that follows a pickle's opcodes.

    The size of a tuple is that of all it holds, each time that it holds it. Lists and dicts grow; keys cannot hold
    them. What a function makes is counted with all its arguments, for they may be what it hashes.

    Args:
        nbytes: Of the pickle.
    """

    def __init__(self, nbytes: int) -> None:
        self._most = MOST_HASHED + 10 * nbytes
        self._hashed = 0
        self._stack: list[list[int]] = []
        self._memo: dict[int, list[int]] = {}

    def follow(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        """The next opcode.

        Raises:
            ValueError: If keys are larger than any that are meant, or the stack has not what the opcode takes.
        """
        name, stack = opcode.name, self._stack
        if name == "MARK":
            stack.append(_MARK)
        elif name in _GETS:
            stack.append(self._memo.get(int(argument), [1]))
        elif name in _PUTS:
            self._memo[int(argument)] = self._top()
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._top()
        elif name in _TUPLES:
            self._build(_TUPLES[name], name)
        elif name == "DUP":
            stack.append(self._top())
        elif pickletools.markobject in opcode.stack_before:
            self._from_mark(name, len(opcode.stack_before) - 2 - opcode.stack_before.index(pickletools.markobject))
        else:
            self._plain(name, len(opcode.stack_before), len(opcode.stack_after))

    def _top(self) -> list[int]:
        if not self._stack or self._stack[-1] is _MARK:
            raise ValueError("an opcode takes an object from an empty stack")
        return self._stack[-1]

    def _take(self, count: int) -> list[list[int]]:
        if len(self._stack) < count:
            raise ValueError("an opcode takes an object from an empty stack")
        taken = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        if any(each is _MARK for each in taken):
            raise ValueError("an opcode takes a mark for an object")
        return taken

    def _build(self, count: int, name: str) -> None:
        size = 1 + sum(each[0] for each in self._take(count))
        if name == "REDUCE" or name.startswith("NEWOBJ"):
            self._hash(size)
        self._stack.append([size])

    def _from_mark(self, name: str, after: int) -> None:
        """Opcodes that take all down to the last mark; some put it into what lies below."""
        at = len(self._stack) - 1
        while at >= 0 and self._stack[at] is not _MARK:
            at -= 1
        if at < 0:
            raise ValueError("an opcode takes objects down to a mark that is not there")
        items = self._take(len(self._stack) - at - 1)
        self._stack.pop()
        size = sum(each[0] for each in items)
        if name in _KEYED:
            self._hash(sum(each[0] for each in items[::2]))
        elif name in _HASHING or name in ("OBJ", "INST"):
            self._hash(size)
        if name in ("APPENDS", "SETITEMS", "ADDITEMS"):
            self._top()[0] += size
        elif name != "POP_MARK":
            self._stack.append([1 + size])

    def _plain(self, name: str, before: int, after: int) -> None:
        if name in ("APPEND", "SETITEM", "BUILD"):
            items = self._take(before - 1)
            if name == "SETITEM":
                self._hash(items[0][0])
            self._top()[0] += sum(each[0] for each in items)
        elif after:
            self._build(before, name)
        else:
            self._take(before)

    def _hash(self, size: int) -> None:
        self._hashed += size
        if self._hashed > self._most:
            raise ValueError("its keys hold each other so often that to compare them takes for ever")
