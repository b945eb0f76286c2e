"""Learning rate and AdamW of a run.

    OptimizerConfig --> learning_rate(step) and torch.optim.AdamW on float32 master weights

Schedule: linear warm-up, then constant, and a linear decay to a tenth when asked for or when `max_steps`
nears (warm-up, stable, decay). The rate depends on the step alone, so that a restart changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trainer.runs.config import RunConfig

_FINAL_FRACTION = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class DecayPhase:
    """Steps in which the learning rate falls."""

    start_step: int
    num_steps: int


def planned_decay(config: RunConfig) -> DecayPhase | None:
    """The decay at the end of a run of known length."""
    if config.max_steps is None or not config.optimizer.decay_steps:
        return None
    num_steps = min(config.optimizer.decay_steps, config.max_steps)
    return DecayPhase(start_step=config.max_steps - num_steps, num_steps=num_steps)


def learning_rate(config: RunConfig, step: int, decay: DecayPhase | None) -> float:
    """Rate of the step that leads from `step` to `step + 1`."""
    warmup = min(1.0, (step + 1) / (config.optimizer.warmup_steps + 1))
    rate = config.learning_rate * warmup
    if decay is None or step < decay.start_step:
        return rate
    done = min(1.0, (step + 1 - decay.start_step) / decay.num_steps)
    return rate * (1 - (1 - _FINAL_FRACTION) * done)


def make_optimizer(drafter: nn.Module, config: RunConfig) -> torch.optim.AdamW:
    """AdamW; norms and biases are not decayed.

    Raises:
        AssertionError: a parameter is not float32.
    """
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    assert all(p.dtype == torch.float32 for p in parameters), "master weights must be float32"
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    options = config.optimizer
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": options.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=1e-8,
    )
