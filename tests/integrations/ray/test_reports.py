"""The names for Ray outside of its workers: what is missing, what cannot work, and what is asked in a driver."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

import zero_strategy.integrations.ray as zero_ray

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'ray[train]'")


@pytest.mark.parametrize("name", zero_ray.__all__)
def test_without_ray_each_name_says_what_it_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for module in [module for module in sys.modules if module.startswith(f"{zero_ray.__name__}.")]:
        monkeypatch.delitem(sys.modules, module)
    needed = f"integrations.ray.{name} needs Ray Train: pip install 'ray\\[train\\]'"
    with pytest.raises(ModuleNotFoundError, match=needed):
        getattr(zero_ray, name)


def test_ray_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'RayStrategy'"):
        zero_ray.RayStrategy  # noqa: B018


@needs_ray
def test_a_storage_path_that_is_no_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.train

    store = SimpleNamespace(filesystem=SimpleNamespace(type_name="s3"), path="bucket/run/checkpoint_1")
    storage = SimpleNamespace(storage_filesystem=store.filesystem, experiment_fs_path="bucket/run")
    context = SimpleNamespace(get_storage=lambda: storage)
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: store)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    with pytest.raises(ValueError, match=r"bucket/run/checkpoint_1 .* type 's3': set RunConfig\(storage_path="):
        zero_ray.reported_checkpoint()
    with pytest.raises(ValueError, match=r"bucket/run is on a file system of type 's3'"):
        zero_ray.report({}, lambda path: None)
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: None)
    assert zero_ray.reported_checkpoint() is None


@needs_ray
def test_a_strategy_for_ray_explains_itself_in_the_driver() -> None:
    from lightning.pytorch import Callback
    from ray.train.lightning import RayDDPStrategy

    for kind in (zero_ray.RayZeroStrategy, zero_ray.RayPipelineStrategy):
        strategy = kind(stage=2)
        assert isinstance(strategy, RayDDPStrategy) and f"ray.{kind.__name__}(" in repr(strategy)
        assert strategy.num_processes == 0 and "stage" in strategy.explain()
    assert isinstance(zero_ray.RayReportCallback(), Callback)
    with pytest.raises(ValueError, match="every_n_epochs=0 and every_n_train_steps=0: one of them has to be more"):
        zero_ray.RayReportCallback(every_n_epochs=0)
    with pytest.raises(ValueError, match="every_n_train_steps=-1"):
        zero_ray.RayReportCallback(every_n_train_steps=-1)


@needs_ray
def test_a_ray_whose_notices_have_moved_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.train

    from zero_strategy.checkpoint.preemption import StepWatch
    from zero_strategy.integrations.ray.notices import NoticeWatch

    monkeypatch.setattr(ray.train, "get_context", lambda: None)
    monkeypatch.setitem(sys.modules, "ray.train.v2._internal.execution.context", SimpleNamespace())
    steps = StepWatch.__new__(StepWatch)  # of which nothing is asked without a notice
    watch = NoticeWatch(steps)
    with pytest.warns(UserWarning, match="does not tell its notices of preemption as Ray 2.60 does") as told:
        watch.look()
        watch.look()
    assert len(told) == 1
