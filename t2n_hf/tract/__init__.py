"""tract."""
