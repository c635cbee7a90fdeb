"""`zero-strategy doctor`: every line says whether it is well, and what to do where it is not."""

from __future__ import annotations

import json
import resource

import pytest

from zero_strategy.cli import main
from zero_strategy.cli.doctor import findings


def test_all_of_it_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json", "--timeout", "200"])
    report = json.loads(capsys.readouterr().out)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert status == 0 and report["ok"], report
    names = "packages, CUDA, cpu library, file I/O, O_DIRECT, memlock, shared memory, gloo, NCCL"
    assert set(names.split(", ")) < set(found)
    assert found["two ranks"]["what"].startswith("trained what one process trains")
    for finding in found.values():
        assert finding["state"] in ("ok", "warn", "fail")
        assert bool(finding["advice"]) == (finding["state"] != "ok"), finding


def test_what_is_wrong_and_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "absent7")
    monkeypatch.setenv("ZERO_STRATEGY_NVME_PATH", "/absent/directory")
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, limits[1]))
    try:
        assert main(["doctor", "--no-train"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)
    said = capsys.readouterr().out
    assert "fail  gloo: GLOO_SOCKET_IFNAME is absent7, which is no interface here\n      -> set GLOO" in said
    assert "warn  O_DIRECT: there is no /absent/directory\n      -> make the directory" in said
    assert "warn  memlock: 66 kB\n      -> io_uring's and pinned memory" in said
    assert "two ranks" not in said and "ok    cpu library" in said


def test_ranks_that_do_not_start() -> None:
    last = list(findings(timeout=0.01))[-1]
    assert (last.name, last.state) == ("two ranks", "fail") and "was not done within 0.01 seconds" in last.what
    assert last.advice and len(last.details) == 2
