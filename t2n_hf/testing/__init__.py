"""The conformance suites: what t2n_hf relies on, as tests that a plugin runs on its own classes and functions.

    from t2n_hf.testing import ModelConformance, WeightFormatConformance

    class TestInt8Rows(WeightFormatConformance):
        weight_format = Int8Rows

    class TestModelsOfInt8Rows(ModelConformance):
        weight_format = Int8Rows

`EmitterConformance` and `RewriteConformance` are the same for emitters of operators and rewrites of modules.

pytest runs the inherited tests. Attributes say what the format promises: how far its values may be from the float ones,
and how far its fast product may be from the exact one.
"""

from t2n_hf.testing.model import ModelConformance
from t2n_hf.testing.seams import EmitterConformance, RewriteConformance, SeamCase
from t2n_hf.testing.weight_format import WeightFormatConformance

__all__ = ["EmitterConformance", "ModelConformance", "RewriteConformance", "SeamCase", "WeightFormatConformance"]
