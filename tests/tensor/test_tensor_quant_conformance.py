"""Q4_0 passes the suite that every plugin runs."""

from t2n_hf.tensor import QTensorTractScaleOnly
from t2n_hf.testing import ModelConformance, WeightFormatConformance


class TestQ40(WeightFormatConformance):
    weight_format = QTensorTractScaleOnly


class TestModelsOfQ40(ModelConformance):
    weight_format = QTensorTractScaleOnly
