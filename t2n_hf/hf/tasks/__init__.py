"""What each task of transformers looks like from outside: the Interface of a model.

`table` names the tasks, `causal` and `encoder` describe models, `settings` is what they share, `choose` picks.
"""

from t2n_hf.hf.tasks.choose import interface_of
from t2n_hf.hf.tasks.settings import capture_settings, usable_context
from t2n_hf.hf.tasks.table import TASKS, Task, auto_class

__all__ = ["TASKS", "Task", "auto_class", "capture_settings", "interface_of", "usable_context"]
