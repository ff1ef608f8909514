"""The `t2n-hf` command."""
