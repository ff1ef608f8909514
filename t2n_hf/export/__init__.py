"""From a model to a checked NNEF archive in its folder.

`exporter` is the whole way: `origin` loads, `graph` captures and lowers, `package` writes, `verify` checks, `report`
tells; a model of several graphs has several `parts`. Lowering: `lower` is the entry, `lowering` one run of it,
`lowered` what it takes and gives, `decompose` what is done without an emitter, `fragments` how a repeated layer is cut,
`nesting` how calls are written into each other. Weights: `formats` chooses how each is written, `weights` writes it,
`bad_values` names those that cannot be.
The check: `reference` asks PyTorch, `check` asks tract and compares, `whole` does so for several graphs as one.
`module_interface` describes modules that are not of transformers, `side_files` are what lies beside the archive,
`config` the options.
"""

from t2n_hf.export.exporter import export_nnef
from t2n_hf.export.report import ExportReport

__all__ = ["ExportReport", "export_nnef"]
