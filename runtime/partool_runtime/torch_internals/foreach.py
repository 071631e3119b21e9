"""Operators on lists of tensors: one call, and on a GPU a few kernels, instead of one for each tensor.

Torch's own optimizers are made of them (https://github.com/pytorch/pytorch/blob/main/torch/optim/adam.py), but they
have no public name. They are torch's functions themselves, so that a call costs what it costs in torch.
"""

from __future__ import annotations

import torch

add_ = torch._foreach_add_
addcdiv_ = torch._foreach_addcdiv_
addcmul_ = torch._foreach_addcmul_
copy_ = torch._foreach_copy_
div = torch._foreach_div
lerp_ = torch._foreach_lerp_
mul = torch._foreach_mul
mul_ = torch._foreach_mul_
norm = torch._foreach_norm
sign_ = torch._foreach_sign_
sqrt = torch._foreach_sqrt
