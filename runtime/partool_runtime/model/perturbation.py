"""Perturbations of embeddings: their first values, the ascent step, and the ball that they stay in.

A perturbation has the shape of the hidden state, ``[B, S, H]``. All norms are those of one token's vector, so ranks
that share a sequence need no exchange. First values depend only on the seed and on the place of a number: the
sequence's number in the run, the token's position, and the index in the hidden state. So they are the same however
sequences and tokens are divided over ranks and micro-batches, on every tensor rank, and after a restart.
"""

from __future__ import annotations

import math

import torch

from partool.spec.training import AdversarialSpec
from partool_runtime.model.norm import wide_dtype

_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a generator whose n-th number needs no earlier one."""
_BITS = 24


def drawn(
    seed: int, sequences_B: torch.Tensor, positions_S: torch.Tensor, hidden: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return numbers ``[B, S, H]`` of ``dtype``, evenly distributed in [-1, 1).

    ``sequences_B`` are the sequences' numbers in the run, ``positions_S`` the tokens' positions in their sequences;
    both are int64.
    """
    keys_B = _mixed(sequences_B + _signed(seed * _GAMMA))
    keys_BS = _mixed(keys_B[:, None] + positions_S)
    places_H = torch.arange(1, hidden + 1, device=sequences_B.device) * _signed(_GAMMA)
    bits_BSH = _shifted_(_mixed(keys_BS[..., None] + places_H), 64 - _BITS)
    return bits_BSH.to(dtype).mul_(2.0 ** (1 - _BITS)).sub_(1.0)


def first_values(spec: AdversarialSpec, uniform_BSH: torch.Tensor) -> torch.Tensor:
    """Return perturbations before the ascent, from numbers in [-1, 1), which are overwritten."""
    largest = spec.epsilon * spec.noise
    return uniform_BSH.mul_(largest / math.sqrt(uniform_BSH.shape[-1]) if spec.norm == "l2" else largest)


def ascended(spec: AdversarialSpec, perturbation_BSH: torch.Tensor, gradient_BSH: torch.Tensor) -> torch.Tensor:
    """Return the perturbation after a step of steepest ascent, projected into the ball.

    The step is ``step_size`` long, in the direction in which the loss grows most: with ``l2`` along the gradient, with
    ``linf`` along the gradient's signs. The perturbation of a token without a gradient does not move.
    """
    step = spec.epsilon if spec.step_size is None else spec.step_size
    gradient_BSH = gradient_BSH.to(perturbation_BSH.dtype)
    if spec.norm == "linf":
        return (perturbation_BSH + step * gradient_BSH.sign()).clamp_(-spec.epsilon, spec.epsilon)
    # The largest number is divided out first, as squares of small gradients would vanish.
    largest_BS1 = gradient_BSH.abs().amax(-1, keepdim=True)
    direction_BSH = gradient_BSH / largest_BS1.where(largest_BS1 != 0.0, 1.0)
    length_BS1 = direction_BSH.norm(dim=-1, keepdim=True)
    moved_BSH = direction_BSH.mul_(step / length_BS1.where(length_BS1 != 0.0, 1.0)).add_(perturbation_BSH)
    length_BS1 = moved_BSH.norm(dim=-1, keepdim=True)
    return moved_BSH.mul_((spec.epsilon / length_BS1.clamp(min=torch.finfo(length_BS1.dtype).tiny)).clamp(max=1.0))


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which perturbations of a hidden state of ``dtype`` are kept."""
    return wide_dtype(dtype)


def _mixed(z: torch.Tensor) -> torch.Tensor:
    """Return the output function of SplitMix64 of every number, as int64 whose bits are those of the unsigned result.

    Products of int64 wrap, as those of unsigned integers do.
    """
    z = z ^ _shifted(z, 30)
    z.mul_(_signed(_FIRST))
    z.bitwise_xor_(_shifted(z, 27)).mul_(_signed(_SECOND))
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right and fill in zeros; torch itself fills in the sign."""
    return _cleared_(z >> bits, bits)


def _shifted_(z: torch.Tensor, bits: int) -> torch.Tensor:
    return _cleared_(z.bitwise_right_shift_(bits), bits)


def _cleared_(z: torch.Tensor, bits: int) -> torch.Tensor:
    return z.bitwise_and_((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """Return the int64 with the lowest 64 bits of a number."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number
