"""The `t2n-hf` command: `main` finds the sub-command; `about`, `export`, `generate`, `inspect`, `share` hold them."""
