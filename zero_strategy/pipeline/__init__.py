"""Pipelines: a model in stages, schedules as data, and what carries them out."""
