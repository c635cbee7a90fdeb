"""Tests of the names of other libraries."""
