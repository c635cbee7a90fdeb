"""Where model state lies: the ledger of long-lived buffers, the same computed ahead, and what a machine has."""
