"""Weights out of a training: whole tensors, unit by unit, under the names of the model's checkpoints."""
