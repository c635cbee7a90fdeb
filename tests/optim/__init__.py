"""Tests of steps on pieces: optimizers, their state, norms, averages."""
