"""`verify` of the faces: the settings are theirs, all else is `diagnostics.verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_strategy.verify.compare import VerifyReport
    from zero_strategy.verify.subject import Factory


def verify_settings(config: Any, factory: Factory, keywords: dict[str, Any]) -> VerifyReport:
    """Verify under a face's settings; see `diagnostics.verify.verify` for the arguments."""
    from zero_strategy.verify import verify

    return verify(factory, config, **keywords)
