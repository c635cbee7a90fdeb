"""Tests of layout and units, without processes."""
