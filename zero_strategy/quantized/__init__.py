"""Weights that other libraries have quantised, as parameters that can be sharded."""
