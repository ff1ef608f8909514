"""Check models of the zoo, one after the other, in a process of its own: `<name> <setting>` in, a line of JSON out."""

import contextlib
import json
import logging
import os
import sys
import warnings

import torch

from zoo import ZOO
from zoo.check import check

__all__ = ["serve"]


def serve() -> None:
    """Answer each line of the standard input, until it ends."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    # What models and libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with warnings.catch_warnings(), contextlib.closing(answers):
        warnings.simplefilter("ignore")
        for line in sys.stdin:
            name, setting = line.split()
            answers.write(json.dumps(check(ZOO[name], setting).to_json()) + "\n")
            answers.flush()


if __name__ == "__main__":
    serve()
