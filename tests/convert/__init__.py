"""Tests of formats of other libraries."""
