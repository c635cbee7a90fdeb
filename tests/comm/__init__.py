"""Tests of groups and collectives."""
