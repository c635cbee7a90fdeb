"""The straggler detector as Megatron has it: one per process, whoever constructs it, also known as `__straggler__`.

For `integrations/megatron`; ours is an ordinary instance, see `straggler`.
"""

from __future__ import annotations

from zero_strategy.diagnostics import straggler


class StragglerDetector(straggler.StragglerDetector):
    """The one detector of the process: a second construction gives it again, as it is."""

    _only: StragglerDetector | None = None

    def __new__(cls) -> StragglerDetector:
        """The one instance."""
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __init__(self) -> None:
        if "_configured" not in self.__dict__:
            super().__init__()


__straggler__ = StragglerDetector()
"""The instance."""
