"""From a model to a checked NNEF archive: joins capture, lowering, weights, check and package."""

from t2n_hf.export.exporter import export_nnef
from t2n_hf.export.report import ExportReport

__all__ = ["ExportReport", "export_nnef"]
