"""A model of the time of a training step at any number of ranks; the command is `python -m benchmarks.scale_model`."""
