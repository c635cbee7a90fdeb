"""The rows of the suite, in the order of the table."""

from __future__ import annotations

from tests.attack import checkpoints, commands, configs, environment, leaks, pickles, published, traversal
from tests.attack.rows import Row

ROWS = (
    Row("configs that multiply and nest", configs.bombs),
    Row("configs with changed characters", configs.fuzz, 20),
    Row("pickles", pickles.bombs),
    Row("zip files with changed bytes", pickles.zips, 20),
    Row("checkpoints of all kinds, damaged or replaced", checkpoints.damages, 5, is_test=False),
    Row("forged manifests", checkpoints.forged_manifests),
    Row("forged manifests of pieces", checkpoints.forged_pieces),
    Row("odd names of tensors", checkpoints.names_of_tensors),
    Row("names that lead elsewhere", traversal.names, 3),
    Row("descriptors after refused files", checkpoints.open_descriptors),
    Row("published folders, forged or replaced", published.forged, 10),
    Row("records with changed bytes", published.records, 20),
    Row("lost changes, two trainings", published.lost),
    Row("places to publish that are none", published.targets),
    Row("hostile servers", published.hostile_servers),
    Row("hostile clients", published.hostile_clients),
    Row("commands with wrong arguments", commands.fuzz, 8),
    Row("narrow surroundings", environment.narrow, is_test=False),
    Row("disks and shared memory without room", environment.full_disks, 3, is_test=False),
    Row("a disk that fails", environment.failing_disk, 4, is_test=False),
    Row("leaks of 100 rounds", leaks.leaks, is_test=False),
)
