"""Bounded memory for values that live elsewhere: leases, prefetch, a byte budget. Knows the `Source` protocol only.

`pool` is what users hold; `source` is what a value has to offer; `lease`, `prefetch`, `scope` are ways to ask for it.
Inside, `table` finds and evicts, `loading` reads, `claims` leases, `room` holds the byte budget and makes threads wait,
`policy` and `learned` choose what leaves memory, `ahead` and `workers` read what comes next,
`stream` what is used without being kept.
"""

from t2n_hf.residency.entry import Claim
from t2n_hf.residency.lease import TensorResidencyLease
from t2n_hf.residency.policy import ResidencyStrategy
from t2n_hf.residency.pool import TensorResidencyPool
from t2n_hf.residency.prefetch import TensorPrefetch
from t2n_hf.residency.scope import active_pool, active_scope
from t2n_hf.residency.serving import ServingPool
from t2n_hf.residency.source import Source, WritableSource

__all__ = [
    "Claim",
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
