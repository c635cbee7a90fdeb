"""Ranks that write a log line."""

from __future__ import annotations

import logging

import pytest
import torch.distributed as dist

from tests.comm.pretended import pretend
from zero_strategy.compat.megatron.diagnostics import log_on_each_pipeline_stage, log_single_rank

LOGGER = logging.getLogger("some.script")


def test_one_rank_writes_and_a_process_alone_always_does(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger=LOGGER.name):
        log_single_rank(LOGGER, logging.INFO, "alone %d", 1, rank=7)
        for rank in range(3):
            with pretend(rank, 3):
                log_single_rank(LOGGER, logging.WARNING, "rank %d of %s", rank, "three", extra={"step": 5})
                log_single_rank(LOGGER, logging.INFO, "rank %d", rank, rank=2)
    assert [record.getMessage() for record in caplog.records] == ["alone 1", "rank 0 of three", "rank 2"]
    assert caplog.records[1].levelno == logging.WARNING and vars(caplog.records[1])["step"] == 5


def test_one_rank_of_each_stage_writes(caplog: pytest.LogCaptureFixture) -> None:
    """Ranks = stages x data x tensor."""
    with caplog.at_level(logging.INFO, logger=LOGGER.name):
        for rank in range(8):
            with pretend(rank, 8):
                tensor, first = rank % 2, rank // 4 * 4
                tp = dist.new_group([rank - tensor, rank - tensor + 1])
                dp = dist.new_group([first + tensor, first + 2 + tensor])
                log_on_each_pipeline_stage(LOGGER, logging.INFO, "rank %d", rank, tp_group=tp, dp_cp_group=dp)
        log_on_each_pipeline_stage(LOGGER, logging.INFO, "alone")
    assert [record.getMessage() for record in caplog.records] == ["rank 0", "rank 4", "alone"]


def test_a_level_that_nobody_wants_costs_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """Log messages may be expensive to make, and a group need not be one that this process may ask."""

    class Unasked:
        def rank(self) -> int:
            raise AssertionError("the level is asked first")

    with caplog.at_level(logging.WARNING, logger=LOGGER.name):
        log_single_rank(LOGGER, logging.INFO, "unwanted")
        log_on_each_pipeline_stage(LOGGER, logging.INFO, "unwanted", tp_group=Unasked())  # type: ignore[arg-type]
    assert caplog.records == []
    with pytest.raises(TypeError, match="level must be an integer"):
        log_single_rank(LOGGER, "INFO", "no level")
