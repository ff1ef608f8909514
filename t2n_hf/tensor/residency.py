"""Scoped residency and asynchronous prefetch for offloaded tensors: the public names of `t2n_hf.residency`."""

from t2n_hf.residency import ResidencyStrategy, TensorPrefetch, TensorResidencyLease, TensorResidencyPool

__all__ = ["ResidencyStrategy", "TensorPrefetch", "TensorResidencyLease", "TensorResidencyPool"]
