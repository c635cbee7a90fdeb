"""Coroutines in tasks of their own: failures are logged, lives are counted."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator

import pytest

from zero_strategy.compat.megatron import diagnostics as async_tasks
from zero_strategy.compat.megatron.diagnostics import AsyncTasks


def test_a_failure_that_nobody_awaits_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    tasks = AsyncTasks()

    @tasks.trace_async_exceptions
    async def fails() -> None:
        raise KeyError("lost otherwise")

    @tasks.trace_async_exceptions
    async def counts() -> AsyncIterator[int]:
        yield 1
        yield 2
        raise OSError("in a generator")

    async def main() -> list[int]:
        task = asyncio.create_task(fails())
        await asyncio.sleep(0)
        assert isinstance(task.exception(), KeyError)  # and it is still there for who asks
        got: list[int] = []
        with pytest.raises(OSError):
            async for value in counts():
                got.append(value)
        waiting = asyncio.create_task(traced_sleep())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return got

    @tasks.trace_async_exceptions
    async def traced_sleep() -> None:
        await asyncio.sleep(60)

    with caplog.at_level(logging.ERROR, logger=async_tasks.__name__):
        assert asyncio.run(main()) == [1, 2]
    assert [record.getMessage().split(".")[-1] for record in caplog.records] == ["fails", "counts"]  # not the cancelled
    assert all(record.exc_info is not None for record in caplog.records)
    assert not tasks.stats
    with pytest.raises(TypeError, match="async functions, not AsyncTasks"):
        tasks.trace_async_exceptions(AsyncTasks)


def test_verbose_counts_lives_and_logs_the_1st_10th_and_100th(caplog: pytest.LogCaptureFixture) -> None:
    tasks = AsyncTasks()

    @tasks.trace_async_exceptions(verbose=True)
    async def double(value: int) -> int:
        """Twice."""
        await asyncio.sleep(0)
        return 2 * value

    async def main() -> list[int]:
        return await asyncio.gather(*(double(value) for value in range(120)))

    with caplog.at_level(logging.INFO, logger=async_tasks.__name__):
        assert asyncio.run(main()) == [2 * value for value in range(120)]
    assert double.__doc__ == "Twice."
    ((name, (count, milliseconds)),) = tasks.stats.items()
    assert name.endswith("double") and count == 120 and milliseconds > 0
    assert [record.args[2] for record in caplog.records if record.args] == [1, 10, 100]  # type: ignore[index]


def test_the_loop_is_the_given_the_running_or_one_that_is_made_once() -> None:
    tasks, given = AsyncTasks(), asyncio.new_event_loop()
    assert tasks.get_asyncio_loop(given) is given and tasks.loop is None
    given.close()

    async def inside() -> bool:
        return tasks.get_asyncio_loop() is asyncio.get_running_loop()

    assert asyncio.run(inside()) and tasks.loop is None
    found = list[bool]()

    def outside() -> None:  # in a thread, whose loop is nobody else's
        made = tasks.get_asyncio_loop()
        found.append(tasks.get_asyncio_loop() is made and asyncio.get_event_loop() is made)
        made.close()
        found.append(tasks.get_asyncio_loop() is not made)
        tasks.get_asyncio_loop().close()

    thread = threading.Thread(target=outside)
    thread.start()
    thread.join()
    assert found == [True, True]
