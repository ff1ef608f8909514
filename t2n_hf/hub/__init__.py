"""Publish an export on the Hub, and fetch it.

A push goes through `stage` (what is sent), `scan` (for what must not become public, listed in `needles`) and `push`; a
fetch through `pull`. `connection` is the token and how failures read, `card` the model card.
"""

from t2n_hf.hub.card import build_card, is_hub_id, read_card_metadata
from t2n_hf.hub.pull import pull_nnef_from_hub
from t2n_hf.hub.push import push_nnef_to_hub

__all__ = ["build_card", "is_hub_id", "pull_nnef_from_hub", "push_nnef_to_hub", "read_card_metadata"]
