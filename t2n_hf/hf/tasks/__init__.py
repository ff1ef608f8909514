"""What each task of transformers looks like from outside: the graphs of a model, and how they meet.

`table` names the tasks, `choose` picks. `causal`, `encoder` and `encoder_decoder` describe models of one modality, from
`inputs` and the `layout` of what they keep. `multimodal` describes models that also read images or sounds: `images` or
`grids` (with `patch_places`) make features, `mixed` puts them among tokens, with the masks of `seen_ahead`; `rows`
stands for an index of all rows. `settings` is what models have in common, `pipeline` what all of this gives.
"""

from t2n_hf.hf.tasks.choose import interface_of, pipeline_of
from t2n_hf.hf.tasks.pipeline import ONE_GRAPH, Pipeline
from t2n_hf.hf.tasks.settings import capture_settings, usable_context
from t2n_hf.hf.tasks.table import TASKS, Task, auto_class

__all__ = [
    "ONE_GRAPH",
    "TASKS",
    "Pipeline",
    "Task",
    "auto_class",
    "capture_settings",
    "interface_of",
    "pipeline_of",
    "usable_context",
]
