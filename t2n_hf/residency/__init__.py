"""Bounded memory for values that live elsewhere: leases, prefetch, a byte budget. Knows the `Source` protocol only.

`pool` is what users hold and `table` what it does under its lock; `policy` chooses what leaves memory, `source` is what
a value has to offer, `lease`, `prefetch` and `scope` are ways to ask for it.
"""

from t2n_hf.residency.lease import TensorResidencyLease
from t2n_hf.residency.policy import ResidencyStrategy
from t2n_hf.residency.pool import TensorResidencyPool
from t2n_hf.residency.prefetch import TensorPrefetch
from t2n_hf.residency.scope import active_pool, active_scope
from t2n_hf.residency.serving import ServingPool
from t2n_hf.residency.source import Source, WritableSource

__all__ = [
    "ResidencyStrategy",
    "ServingPool",
    "Source",
    "TensorPrefetch",
    "TensorResidencyLease",
    "TensorResidencyPool",
    "WritableSource",
    "active_pool",
    "active_scope",
]
