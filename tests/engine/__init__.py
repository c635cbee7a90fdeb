"""Tests of the engine on several ranks, against one process."""
