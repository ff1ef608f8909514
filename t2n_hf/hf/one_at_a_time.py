"""What changes something of the whole process for a while is done by one thread at a time.

transformers changes methods of its classes, and torch's default dtype, while it makes a model; torch.export patches
classes of torch while it traces; Python's filters of warnings are put back as they were found. Of two threads that do
so at once, one puts back what the other one had put there, and it stays: no model ties its weights from then on.
"""

from threading import RLock
from typing import Final

__all__ = ["ONE_AT_A_TIME"]

ONE_AT_A_TIME: Final = RLock()
"""Held while a checkpoint is loaded or saved, and while a model is exported."""
