"""Time of one optimizer step: bounds of many layouts, the prediction of one."""

from partool.cost.bound import bound_s
from partool.cost.predict import predict_time

__all__ = ["bound_s", "predict_time"]
