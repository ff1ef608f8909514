"""The classes of this package pass the suite that every plugin runs."""

from t2n_hf.tensor import QTensorTractScaleOnly
from t2n_hf.tensor.quant import QTensorTractQ81, TernaryTensor
from t2n_hf.testing import ModelConformance, WeightFormatConformance


class TestQ40(WeightFormatConformance):
    weight_format = QTensorTractScaleOnly


class TestModelsOfQ40(ModelConformance):
    weight_format = QTensorTractScaleOnly


class TestQ81(WeightFormatConformance):
    weight_format = QTensorTractQ81
    max_relative_error = 0.006


class TestModelsOfQ81(ModelConformance):
    weight_format = QTensorTractQ81


class TestTernary(WeightFormatConformance):
    weight_format = TernaryTensor
    max_relative_error = 0.45


class TestModelsOfTernary(ModelConformance):
    weight_format = TernaryTensor
