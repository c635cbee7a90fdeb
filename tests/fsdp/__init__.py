"""Tests of sharding: units, gathers, releases, gradients, and what users do to parameters."""
