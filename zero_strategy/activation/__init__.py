"""What autograd keeps of a forward for its backward, and what is computed again instead."""
