"""Tests of the benchmarks' arithmetic. No times are asserted."""
