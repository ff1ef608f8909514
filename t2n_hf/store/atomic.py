"""Staged writes, under the name by which state is stored: see `t2n_hf.atomic`."""

from t2n_hf.atomic import PARTIAL_SUFFIX, staged_file, staged_folder

__all__ = ["PARTIAL_SUFFIX", "staged_file", "staged_folder"]
