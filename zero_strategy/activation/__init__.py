"""Activations: recomputed instead of kept, kept in parts or on the host; and the random state that this needs."""
