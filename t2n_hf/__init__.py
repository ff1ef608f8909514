"""The bridge from Hugging Face to tract: load as opaque tensors, run in bounded memory, export to NNEF, check, push.

Importing this package makes transformers know `T2NConfig` and the models that were saved with it. It does nothing else:
what exports, quantizes folders, runs archives or talks to the Hub is imported when its name is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

from t2n_hf.garbage import collection_paused
from t2n_hf_command import only_help_follows

# `python -m t2n_hf --help` runs this file first, and needs none of it.
if not only_help_follows():
    with collection_paused():
        from t2n_hf.hf.config import T2NConfig
        from t2n_hf.hf.materialize import materialize
        from t2n_hf.hf.quantizer import register

        register()

if TYPE_CHECKING:
    from t2n_hf.export import export_nnef
    from t2n_hf.hf.calibration.importance import Importance
    from t2n_hf.hf.calibration.run import calibrate
    from t2n_hf.hf.dispatch.entry import dispatch_model, load_checkpoint_and_dispatch
    from t2n_hf.hf.dispatch.outlook import plan_placement
    from t2n_hf.hf.quantize.checkpoint import quantize_checkpoint
    from t2n_hf.hub import pull_nnef_from_hub, push_nnef_to_hub
    from t2n_hf.tract.image_text import TractModelForImageTextToText
    from t2n_hf.tract.model import TractModelForCausalLM
    from t2n_hf.tract.seq2seq import TractModelForSeq2SeqLM

__all__ = [
    "Importance",
    "T2NConfig",
    "TractModelForCausalLM",
    "TractModelForImageTextToText",
    "TractModelForSeq2SeqLM",
    "calibrate",
    "dispatch_model",
    "export_nnef",
    "load_checkpoint_and_dispatch",
    "materialize",
    "plan_placement",
    "pull_nnef_from_hub",
    "push_nnef_to_hub",
    "quantize_checkpoint",
]

__version__ = "0.1.0"

_LATER: Final = {
    "Importance": "t2n_hf.hf.calibration.importance",
    "TractModelForCausalLM": "t2n_hf.tract.model",
    "TractModelForImageTextToText": "t2n_hf.tract.image_text",
    "TractModelForSeq2SeqLM": "t2n_hf.tract.seq2seq",
    "calibrate": "t2n_hf.hf.calibration.run",
    "dispatch_model": "t2n_hf.hf.dispatch.entry",
    "export_nnef": "t2n_hf.export",
    "load_checkpoint_and_dispatch": "t2n_hf.hf.dispatch.entry",
    "plan_placement": "t2n_hf.hf.dispatch.outlook",
    "pull_nnef_from_hub": "t2n_hf.hub",
    "push_nnef_to_hub": "t2n_hf.hub",
    "quantize_checkpoint": "t2n_hf.hf.quantize.checkpoint",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name means
    """Import what is used for the first time."""
    if name not in _LATER:
        raise AttributeError(f"module 't2n_hf' has no attribute {name!r}")
    with collection_paused():
        return getattr(importlib.import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    """List the public names, those not imported yet too."""
    return sorted({*globals(), *__all__})
