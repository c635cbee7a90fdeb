"""Training whose bits do not depend on the number of ranks: slots, their tree of sums, random streams and samples."""
