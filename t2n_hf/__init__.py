"""The bridge from Hugging Face to tract: load as opaque tensors, run in bounded memory, export to NNEF, check, push.

Importing this package makes transformers know `T2NConfig` and the models that were saved with it. It does nothing else.
"""

from t2n_hf.hf.config import T2NConfig
from t2n_hf.hf.materialize import materialize
from t2n_hf.hf.quantizer import register

__all__ = ["T2NConfig", "materialize"]

__version__ = "0.1.0"

register()
