"""The 4-site FedHAvg run as a plain sequential PyTorch loop: what the engine is compared with, in numbers and in time.

Written from the paper's section 4 and from the facts known of the released code (github.com/Jiyao96/FedHAvg, 45e2bc4):
an MLP of Linear, LayerNorm, ReLU blocks; one model object per site that loads the global weights, trains one epoch and
hands back its weights; a server that combines them tensor by tensor. Nothing of the engine is imported here.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

State = dict[str, torch.Tensor]
EPS = 1e-12
MARGIN = 1e-5


class Training(NamedTuple):
    """A site's local training; `paper` and `released` differ in the last four."""

    optimizer: str = "sgd"  # or 'adam'
    lr: float = 1e-4
    weight_decay: float = 1e-3
    momentum: float = 0.9
    nesterov: bool = False
    keep_optimizer: bool = False  # the buffers of a site live on from round to round
    double_softmax: bool = False  # cross entropy of the softmax
    fused: bool = False  # PyTorch's fused optimiser kernels, which the released code does not ask for


class Curvature(NamedTuple):
    """The ball of a hyperbolic mean; margin_on: 'radius' (released code) or 'argument' (paper)."""

    c: float
    gamma: float
    margin_on: str


def mlp(width: int, hidden: Sequence[int], classes: int = 2) -> torch.nn.Sequential:
    """width-hidden-classes with LayerNorm and ReLU after every hidden layer; logits."""
    layers: list[torch.nn.Module] = []
    for size in hidden:
        layers += [torch.nn.Linear(width, size), torch.nn.LayerNorm(size), torch.nn.ReLU()]
        width = size
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, classes))


class Site:
    """One hospital: its cases, its model object and, where kept, its optimiser."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, hidden: Sequence[int], how: Training):
        self.x, self.y, self.how = x, y, how
        self.model = mlp(x.shape[1], hidden).to(x.dtype)
        self.optimizer = self._optimizer()

    def _optimizer(self) -> torch.optim.Optimizer:
        how = self.how
        parameters: Any = self.model.parameters()
        shared: dict[str, Any] = {"lr": how.lr, "weight_decay": how.weight_decay}
        if how.fused:  # not passed otherwise: None lets PyTorch choose as it does for everybody
            shared["fused"] = True
        if how.optimizer == "adam":
            return torch.optim.Adam(parameters, **shared)
        return torch.optim.SGD(parameters, momentum=how.momentum, nesterov=how.nesterov, **shared)

    def train(self, weights: State, batches: Sequence[torch.Tensor]) -> State:
        """The weights after one pass over `batches` (indices of this site's cases) from `weights`."""
        self.model.load_state_dict(weights)
        if not self.how.keep_optimizer:
            self.optimizer = self._optimizer()
        self.model.train()
        for batch in batches:
            logits = self.model(self.x[batch])
            if self.how.double_softmax:
                logits = torch.softmax(logits, dim=1)
            loss = torch.nn.functional.cross_entropy(logits, self.y[batch])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


def federated_round(
    weights: State,
    sites: Sequence[Site],
    batches: Sequence[Sequence[torch.Tensor]],
    rule: Callable[[torch.Tensor], torch.Tensor],
    of: str = "weights",
) -> State:
    """The global weights after one round: every site in turn, then `rule` on each tensor's stack [C, ...].

    of: 'weights', or 'updates' (rule on local - global, added to global).
    """
    trained = [site.train(weights, own) for site, own in zip(sites, batches)]
    if of == "weights":
        return {name: rule(torch.stack([t[name] for t in trained])) for name in weights}
    return {name: w + rule(torch.stack([t[name] - w for t in trained])) for name, w in weights.items()}


def shuffled(cases: int, batch_size: int) -> Sequence[torch.Tensor]:
    """One epoch in random order."""
    return torch.split(torch.randperm(cases), batch_size)


def mean(stack: torch.Tensor) -> torch.Tensor:
    return stack.mean(0)


def median(stack: torch.Tensor) -> torch.Tensor:
    """torch.median: the lower of the two middle values where the number of sites is even."""
    return stack.median(0).values


def extrinsic_mean(stack: torch.Tensor, ball: Curvature) -> torch.Tensor:
    """log0(mean exp0(gamma x)) / gamma."""
    return _leave(torch.stack([_enter(x, ball) for x in stack]).mean(0), ball)


def gyro_mean(stack: torch.Tensor, ball: Curvature) -> torch.Tensor:
    """log0(0 (+) 1/K (x) y_1 (+) ... (+) 1/K (x) y_K) / gamma, folded from the left in the order of the sites."""
    total = torch.zeros_like(stack[0])
    for x in stack:
        total = _mobius_add(total, _mobius_scalar(1 / len(stack), _enter(x, ball), ball.c), ball.c)
    return _leave(total, ball)


def _enter(x: torch.Tensor, ball: Curvature) -> torch.Tensor:
    u = ball.gamma * x
    r = torch.linalg.vector_norm(u)
    if r < EPS:
        return u
    s = math.sqrt(ball.c) * r
    return torch.tanh(s) / s * u


def _leave(y: torch.Tensor, ball: Curvature) -> torch.Tensor:
    root = math.sqrt(ball.c)
    r = torch.linalg.vector_norm(y)
    if r < EPS:
        return y / (ball.gamma + EPS)
    furthest = 1 / root - MARGIN if ball.margin_on == "radius" else (1 - MARGIN) / root
    direction = y / r
    s = root * torch.clamp(r, max=furthest)
    return torch.atanh(s) / root * direction / (ball.gamma + EPS)


def _mobius_scalar(factor: float, x: torch.Tensor, c: float) -> torch.Tensor:
    r = torch.linalg.vector_norm(x)
    if r < EPS:
        return factor * x
    s = torch.clamp(math.sqrt(c) * r, max=1 - EPS)
    return torch.tanh(factor * torch.atanh(s)) / (math.sqrt(c) * r) * x


def _mobius_add(x: torch.Tensor, y: torch.Tensor, c: float) -> torch.Tensor:
    xx, yy, xy = (x * x).sum(), (y * y).sum(), (x * y).sum()
    top = (1 + 2 * c * xy + c * yy) * x + (1 - c * xx) * y
    return top / (1 + 2 * c * xy + c * c * xx * yy + EPS)
