"""Tests of tiers: memory of the host and files."""
