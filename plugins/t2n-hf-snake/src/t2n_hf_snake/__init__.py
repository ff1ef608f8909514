"""A library with an operator and a layer of its own, and what t2n-hf needs to export both.

`layers` is the library: it knows nothing of t2n-hf. `emitters` and `rewrites` are what its pyproject.toml declares.
"""

from t2n_hf_snake.layers import Fading, Snake, snake

__all__ = ["Fading", "Snake", "snake"]
