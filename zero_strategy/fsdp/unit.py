"""A unit at stage 3: buckets that are gathered and released together, and who uses them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from zero_strategy.fsdp.gathered_codes import GatheredCodes
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.fsdp.released import release_classes, unshard_classes
from zero_strategy.runtime.torch_private import is_compiled


class Unit:
    """Buckets that are gathered and released together.

    Attributes:
        name: Name of the module ("" for the root).
        module: The module whose forward brackets the use.
        buckets: Its parameters.
        depth: Forwards under way that use it.
        calls: Backwards of earlier forwards under way.
        open_calls: Forwards under way that may be followed by a backward, innermost last.
        awaited: Earlier forwards whose backward is not over.
        pinned: Users outside forward and backward (`GatheredParameters`, `state_dict`).
        has_codes: Some buckets have weights that may be gathered as layers cast them.
        in_codes: They are, in the present or last use.
        expects_codes: Its layers cast weights when they were last called.
        hidden: It stays whole for the backward that follows, and its parameters look released, so that reads of other
            code than its forward and backward are seen.
        wants_values: Forwards use values all the same: code looks at parameters itself.
    """

    def __init__(self, name: str, module: nn.Module, buckets: Sequence[ParameterBucket]) -> None:
        self.name, self.module, self.buckets = name, module, list(buckets)
        self.depth = 0
        self.calls: set[int] = set()
        self.open_calls: list[int] = []
        self.awaited: set[int] = set()
        self.pinned = 0
        self.has_codes = self.in_codes = self.wants_values = self.hidden = False
        self.expects_codes = True
        self._looked_at: set[tuple[str, ...]] = set()
        """Weights that no layer has asked for in a forward, and that were no NaN in it."""

    @property
    def gathered(self) -> bool:
        """True if all parameters are whole."""
        return all(bucket.gathered for bucket in self.buckets)

    @property
    def under_way(self) -> bool:
        """True if all that a forward uses is there, or on its way."""
        return all(used.gathered or used.pending for used in self.used())

    def used(self) -> Sequence[ParameterBucket | GatheredCodes]:
        """The form of each bucket that a forward or a backward uses."""
        if not self.has_codes:
            return self.buckets
        return [bucket.used(in_codes=self.in_codes) for bucket in self.buckets]

    def start_use(self) -> None:
        """Begin to gather what a forward or a backward uses; returns at once."""
        for used in self.used():
            used.start_unshard()

    def gather_for_use(self) -> None:
        """Gather it, and wait until it can be used."""
        self.start_use()
        for used in self.used():
            used.finish_unshard()
        self.show()

    def start_unshard(self) -> None:
        """Begin to gather the parameters' values; returns at once."""
        for bucket in self.buckets:
            bucket.start_unshard()

    def gather(self) -> None:
        """Gather, and wait until the parameters are whole."""
        self.start_unshard()
        for bucket in self.buckets:
            bucket.finish_unshard()
        self.show()

    def hide(self) -> None:
        """Let parameters that are whole, and not kept for all to see, look released."""
        for bucket in self.buckets:
            if bucket.gathered and not bucket.kept:
                release_classes(bucket.parameters)
                self.hidden = True

    def show(self) -> None:
        """Let them be seen again."""
        if self.hidden:
            self.hidden = False
            for bucket in self.buckets:
                if bucket.gathered:
                    unshard_classes(bucket.parameters)

    def casts(self, *, ahead: bool = False) -> bool:
        """True if layers of a forward that begins now cast weights. The same on all ranks, which run the same code.

        Args:
            ahead: The layers are called later, when autocast may have begun: as the last forward is expected to do.
        """
        if not self.has_codes or self.wants_values:
            return False
        return self._wants_codes() or (ahead and self.expects_codes)

    def look(self) -> None:
        """Layers of the unit are called now: as they cast, the next forward is expected to."""
        self.expects_codes = self._wants_codes()

    def forget_asked(self) -> None:
        """A forward begins, in which no layer has asked for its weight yet."""
        for bucket in self.buckets if self.has_codes else ():
            if bucket.codes is not None:
                bucket.codes.asked.clear()

    def check_asked(self, outputs: Iterable[Tensor]) -> None:
        """Look once whether weights that no layer has asked for were read as NaN, past torch's functions.

        Raises:
            RuntimeError: If that is so; names them and the way out.
        """
        unasked = tuple(
            name
            for bucket in self.buckets
            if bucket.codes is not None and bucket.codes.gathered and not bucket.gathered
            for index, name in enumerate(bucket.names)
            if index not in bucket.codes.asked
        )
        found = list(outputs) if unasked and unasked not in self._looked_at else []
        if not found:  # nearly always; a forward that has raised has none either
            return
        if any(bool(output.isnan().any()) for output in found if output.is_floating_point()):
            raise RuntimeError(
                f"the output of unit {self.name or 'root'!r} has NaN, and its forward has not used "
                f"{', '.join(unasked)} by torch's functions: TorchScript, extensions and nested tensors that a unit "
                "makes read memory that is released (stage 3). Set communication.parameters to 'values'"
            )
        self._looked_at.add(unasked)

    def _wants_codes(self) -> bool:
        return any([bucket.codes.wanted() for bucket in self.buckets if bucket.codes is not None])

    @property
    def has_values(self) -> bool:
        """True if there are values where a forward would use codes."""
        return self.has_codes and any(bucket.codes is not None and bucket.gathered for bucket in self.buckets)

    @property
    def is_compiled(self) -> bool:
        """True if `torch.compile` has a hold on one of its modules, which then look at parameters themselves."""
        return any(is_compiled(part) for part in self.module.modules())

    def release(self) -> None:
        """Free all but the own slices of what is not kept, unless somebody still uses them."""
        if not self.depth and not self.calls and not self.pinned:
            self.show()  # what is written to counts, and is looked for by class
            for bucket in self.buckets:
                if not bucket.kept:
                    bucket.release()
                if bucket.codes is not None:
                    bucket.codes.release()

    def keep(self) -> None:
        """Stay whole until let go."""
        for bucket in self.buckets:
            bucket.kept = True
