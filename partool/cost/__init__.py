"""What a layout costs: pure functions, one equation each."""

from partool.cost.memory import predict_memory
from partool.cost.step import predict_time
from partool.cost.work import Work

__all__ = ["Work", "predict_memory", "predict_time"]
