"""nnef."""
