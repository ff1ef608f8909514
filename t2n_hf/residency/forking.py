"""Pools survive a fork: a child starts with free locks, and without the loads of threads that it does not have."""

import os
import weakref
from threading import Lock
from typing import Final, Protocol

__all__ = ["Forked", "tell_of_forks"]


class Forked(Protocol):
    """What is told of forks, in the thread that forks."""

    def before_fork(self) -> None:
        """Hold still."""

    def after_fork_in_parent(self) -> None:
        """Go on."""

    def after_fork_in_child(self) -> None:
        """Go on without the other threads."""


_TOLD: Final["weakref.WeakSet[Forked]"] = weakref.WeakSet()
_HELD: Final[list[Forked]] = []
# Two threads that fork at once would hold some each, and go on with those of the other.
_FORKING: Final = Lock()


def tell_of_forks(one: Forked) -> None:
    """Tell `one` of every fork from now on, as long as it lives."""
    with _FORKING:  # `_before` goes through all of them
        _TOLD.add(one)


def _before() -> None:
    _FORKING.acquire()
    for one in list(_TOLD):
        one.before_fork()
        _HELD.append(one)


def _in_parent() -> None:
    while _HELD:
        _HELD.pop().after_fork_in_parent()
    _FORKING.release()


def _in_child() -> None:
    while _HELD:
        _HELD.pop().after_fork_in_child()
    _FORKING.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
