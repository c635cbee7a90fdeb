"""Observation of runs: recording and reports, stragglers, replicas, values that are not finite.

Nothing in the training path imports it.
"""
