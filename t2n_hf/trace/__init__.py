"""Capture of a model as graphs of ATen calls, by torch.export under fake tensors: no weight is read.

`interface` says what is captured (made by `hf.tasks` or `export.module_interface`), `capture` does it, `captured` is
what comes of it. On the way: `fakes` stand in for weights, `flat` lays arguments flat, `pieces` traces each kind of
repeated layer once (`layers` tells kinds apart, `tracing` traces one), `passes` simplify the graphs.
"""
