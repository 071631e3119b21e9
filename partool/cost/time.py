"""Time of one optimizer step: bounds of many layouts, the prediction of one."""

from partool.cost.bound import bound_s
from partool.cost.predict import predict_time

RELATIVE_ERROR = {"cpu": 0.3, "cuda": 0.25, "rocm": 0.3}
"""One standard deviation of the step time without calibration, from published runs of FSDP2 and runs on a CPU."""

__all__ = ["RELATIVE_ERROR", "bound_s", "predict_time"]
