"""The launcher does what tests rely on, and the oracles agree with each other."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.launcher import Launcher, RankError
from tests.models import KINDS, MARK, Kind, build, param_groups
from tests.reference import (
    ORDERS,
    Order,
    adamw,
    adamw_foreach,
    errors,
    flat_state,
    global_batch,
    merge_ranks,
    micro_batch,
    train_ddp,
    train_plain,
    train_rank_separated,
    unequal,
)


def rank_sum(base: int, *, extra: int = 0) -> tuple[int, int, Tensor]:
    total = torch.tensor(float(base + extra + dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total


def process_state() -> tuple[int, int, str | None, str | None]:
    return os.getpid(), torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS"), os.environ.get("EXTRA")


def spoil_state() -> None:
    os.environ["EXTRA"] = "left over"
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    store = dist.distributed_c10d._get_default_store()  # no rank closes its group while another one still connects
    store.add("spoiled", 1)
    while store.add("spoiled", 0) < dist.get_world_size():
        time.sleep(0.01)
    dist.destroy_process_group()


def large_result() -> Tensor:
    return torch.full((1 << 20,), float(dist.get_rank()))


def fail_on(rank: int) -> str:
    print("before the failure")
    if dist.get_rank() == rank:
        raise KeyError("the culprit")
    dist.barrier()
    return "not reached"


def fail_everywhere() -> None:
    raise ValueError(f"bad input on rank {dist.get_rank()}")


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


def wait_for_nobody() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def load_in_workers() -> int:
    data = torch.utils.data.TensorDataset(torch.arange(4))
    return sum(int(row) for (row,) in torch.utils.data.DataLoader(data, num_workers=1))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int]) -> bool:
    end = time.monotonic() + 20
    while time.monotonic() < end and any(alive(pid) for pid in pids):
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_come_back_in_rank_order(ranks: Launcher, world: int) -> None:
    results = ranks(world)(rank_sum, 10, extra=1)
    total = 11.0 * world + sum(range(world))
    expected = [(rank, world, total) for rank in range(world)]
    assert [(rank, size, value.item()) for rank, size, value in results] == expected


def test_a_pool_is_reused_and_its_state_cleaned(ranks: Launcher) -> None:
    first = ranks(2, env={"EXTRA": "given"})(process_state)
    assert [entry[1:] for entry in first] == [(1, "1", "given")] * 2
    ranks(2)(spoil_state)
    again = ranks(2)(process_state)
    assert [entry[0] for entry in again] == [entry[0] for entry in first]
    assert [entry[1:] for entry in again] == [(1, "1", None)] * 2
    assert ranks(2)(rank_sum, 0)[0][2].dtype == torch.float32


def permanent(undo: bool = False) -> int:
    count = gc.get_freeze_count()
    if undo:
        gc.unfreeze()
    return count


def test_the_objects_of_libraries_are_permanent_again_after_each_run(ranks: Launcher) -> None:
    assert ranks(1)(permanent, True)[0] > 100_000
    assert ranks(1)(permanent)[0] > 100_000


def test_large_tensors_come_back(ranks: Launcher) -> None:
    results = ranks(2)(large_result)
    assert [value.sum().item() for value in results] == [0.0, float(1 << 20)]


def test_a_rank_may_start_processes(ranks: Launcher) -> None:
    assert ranks(2)(load_in_workers) == [6, 6]


def test_an_exception_names_the_rank_and_the_line(ranks: Launcher) -> None:
    old = ranks(2)(process_state)
    ranks(2)(spoil_state)
    with pytest.raises(RankError, match="rank 1 raised first: KeyError: 'the culprit'") as info:
        ranks(2)(fail_on, 1)
    failures = info.value.failures
    assert failures[1].exception == "builtins.KeyError"
    assert "in fail_on" in failures[1].text and "before the failure" in failures[1].log
    assert failures[0].kind == "hung" and "barrier" in failures[0].text
    new = ranks(2)(process_state)
    assert not {entry[0] for entry in old} & {entry[0] for entry in new}
    assert wait_until_gone([entry[0] for entry in old])


def test_every_rank_is_heard(ranks: Launcher) -> None:
    with pytest.raises(RankError) as info:
        ranks(3)(fail_everywhere)
    failures = info.value.failures
    assert sorted(failures) == [0, 1, 2]
    assert all(f"bad input on rank {rank}" in failure.text for rank, failure in failures.items())


def test_a_death_is_noticed(ranks: Launcher) -> None:
    with pytest.raises(RankError, match="ended by signal SIGKILL") as info:
        ranks(2)(die_on, 1)
    assert info.value.failures[1].kind == "died"


def test_a_timeout_shows_the_stacks_and_kills(ranks: Launcher) -> None:
    pids = [entry[0] for entry in ranks(2)(process_state)]
    with pytest.raises(RankError, match=r"no answer from every rank within 2 s") as info:
        ranks(2, timeout=2)(wait_for_nobody)
    assert "wait_for_nobody" in info.value.failures[0].text
    assert wait_until_gone(pids)
    assert len(ranks(2)(rank_sum, 0)) == 2


def test_only_functions_at_module_level(ranks: Launcher) -> None:
    with pytest.raises(TypeError, match="module level"):
        ranks(1)(lambda: None)


ORPHANS = """
import os, signal, sys
from tests.launcher import RankPool
from tests.test_harness import die_on
if __name__ == "__main__":
    pool = RankPool(2)
    print(*pool.pids, flush=True)
    signal.alarm(1)
    pool.run(die_on, (5,))
"""


def test_ranks_end_with_a_killed_test_process(tmp_path: Path) -> None:
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    root = Path(__file__).parents[1]
    env = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, timeout=180)
    assert done.returncode == -signal.SIGALRM, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2 and wait_until_gone(pids)


def test_the_batches_use_a_parameter_on_some_ranks_only() -> None:
    def marked(step: int, rank: int) -> bool:
        batch = micro_batch(global_batch("transformer", step, 2, 1), rank, 2, 0)
        return bool((batch.inputs[:, 0] == MARK).any())

    used = [[marked(step, rank) for rank in range(2)] for step in range(6)]
    assert [False, False] in used and ([True, False] in used or [False, True] in used)


def test_the_models_hold_every_kind_of_parameter() -> None:
    for kind in KINDS:
        model = build(kind)
        named = dict(model.named_parameters())
        assert len(list(model.named_parameters(remove_duplicate=False))) > len(named)
        assert any(not p.requires_grad for p in named.values())
        trained = train_plain(kind, 1, 1, 1, None)
        assert any(p.requires_grad and name not in trained.optimizer for name, p in named.items())
        assert sum(len(group["params"]) for group in param_groups(model)) == len(named)
    shapes = [tuple(p.shape) for p in build("transformer").parameters()]
    assert (0, 4) in shapes and () in shapes


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_rank_separated_is_close_to_plain(kind: Kind, order: Order) -> None:
    separated = train_rank_separated(kind, 2, 3, 10, 0.5, order)
    plain = train_plain(kind, 2, 3, 10, 0.5)
    assert plain.mean_losses()[-1] < plain.mean_losses()[0]
    for ours, theirs in zip(separated.mean_losses(), plain.mean_losses(), strict=True):
        assert abs(ours - theirs) <= 1e-6
    assert separated.optimizer.keys() == plain.optimizer.keys()


def test_the_orders_are_the_same_without_accumulation_and_differ_with_it() -> None:
    one = [train_rank_separated("transformer", 2, 1, 3, None, order).weights for order in ORDERS]
    assert not unequal(one[0], one[1])
    three = [train_rank_separated("transformer", 3, 3, 3, None, order).weights for order in ORDERS]
    assert unequal(three[0], three[1])


def test_foreach_and_loop_give_the_same() -> None:
    loop = train_rank_separated("convnet", 2, 1, 3, None, "per_step", adamw)
    foreach = train_rank_separated("convnet", 2, 1, 3, None, "per_step", adamw_foreach)
    assert max(errors(foreach.weights, loop.weights).values()) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_ddp_on_two_ranks_is_the_per_step_order(ranks: Launcher, kind: Kind) -> None:
    """Halving is exact: without clipping, DDP's average of two ranks is the documented one, bit for bit."""
    ddp = merge_ranks(ranks(2)(train_ddp, kind, 3, 10, None))
    separated = train_rank_separated(kind, 2, 3, 10, None, "per_step")
    assert ddp.losses == separated.losses
    assert not unequal(ddp.weights, separated.weights)
    assert not unequal(flat_state(ddp.optimizer), flat_state(separated.optimizer))


@pytest.mark.parametrize("kind", KINDS)
def test_clipped_ddp_is_close(ranks: Launcher, kind: Kind) -> None:
    ddp = merge_ranks(ranks(2)(train_ddp, kind, 1, 10, 0.5))
    separated = train_rank_separated(kind, 2, 1, 10, 0.5, "per_step")
    for ours, theirs in zip(separated.mean_losses(), ddp.mean_losses(), strict=True):
        assert abs(ours - theirs) <= 1e-6
