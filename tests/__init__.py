"""Tests of zero_strategy."""
