"""The example's data: what is read, how it is split, which windows are drawn."""

from pathlib import Path

import pytest
import torch

from stdlib_data import EvenWindows, RandomWindows, is_validation, read_corpus, source_files


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Two hundred small files, each of one repeated byte pair, and some that must be skipped."""
    for number in range(200):
        (tmp_path / f"module_{number:03}.py").write_text(f"{number:03}\n")
    for folder in ("site-packages", "package/tests"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "skipped.py").write_text("skipped")
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere")
    return tmp_path


def test_split_is_by_file_complete_and_disjoint(library: Path) -> None:
    corpus = read_corpus(library)
    train = set(bytes(corpus.train.tolist()).decode().split())
    validation = set(bytes(corpus.validation.tolist()).decode().split())
    assert train.isdisjoint(validation)
    assert train | validation == {f"{number:03}" for number in range(200)}
    assert 0 < len(validation) < 30


def test_split_depends_on_names_alone(library: Path) -> None:
    before = {path for path in source_files(library) if is_validation(path)}
    (library / "another.py").write_text("x")
    after = {path for path in source_files(library) if is_validation(path)}
    assert after - before <= {Path("another.py")} and before <= after


def test_reading_twice_gives_the_same_bytes(library: Path) -> None:
    first, second = read_corpus(library), read_corpus(library)
    assert torch.equal(first.train, second.train) and torch.equal(first.validation, second.validation)


def test_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="too few"):
        read_corpus(tmp_path)


def test_this_interpreter_has_a_library_to_train_on() -> None:
    corpus = read_corpus()
    assert len(corpus.train) > 1_000_000 and len(corpus.validation) > 10_000
    assert corpus.train.dtype == torch.uint8


def test_random_windows_depend_on_seed_and_index_alone() -> None:
    text = torch.arange(10_000).remainder(251).to(torch.uint8)
    windows = RandomWindows(text, count=1000, block_size=16, seed=7)
    again = RandomWindows(text, count=5, block_size=16, seed=7)
    other = RandomWindows(text, count=5, block_size=16, seed=8)
    assert windows[3].shape == (17,) and windows[3].dtype == torch.int64
    assert torch.equal(windows[3], again[3])
    assert not torch.equal(windows[3], other[3])
    starts = {windows.start(index) for index in range(1000)}
    assert len(starts) > 900 and max(starts) <= len(text) - 17


def test_even_windows_span_the_text() -> None:
    text = torch.arange(100).to(torch.uint8)
    windows = EvenWindows(text, count=4, block_size=9)
    assert windows[0][0] == 0 and windows[3][-1] == 99
    assert len({windows.start(index) for index in range(4)}) == 4


def test_too_short_a_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="no window"):
        EvenWindows(torch.zeros(8, dtype=torch.uint8), count=1, block_size=8)
