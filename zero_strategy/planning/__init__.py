"""Memory: the ledger of what a rank holds, the same planned from shapes, and whether it fits."""
