"""Preference losses: DPO, ORPO, SimPO and KTO, from the log-probabilities of `sequence_logprobs`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ts_core.errors import ArgumentError, ArgumentTypeError, message
from ts_core.options import choice, number

__all__ = ["PreferenceLoss", "dpo_loss", "kto_loss", "orpo_loss", "simpo_loss"]


class PreferenceLoss(NamedTuple):
    """A preference loss and what it was made of.

    Attributes:
        loss: 0-dimensional float32 with a graph; `(N,)` with `reduction="none"`.
        chosen_rewards: `(N,)` float32 without a graph.
        rejected_rewards: The same for the rejected answers; for KTO both hold the pairs of their kind alone.
    """

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def _check(name: str, **given: Tensor) -> list[Tensor]:
    """Return the values in fp32; all have one dimension and the same shape."""
    shape: torch.Size | None = None
    for argument, tensor in given.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = getattr(tensor, "dtype", type(tensor).__name__)
            raise ArgumentTypeError(message(name, argument, "a floating-point tensor", str(kind)))
        shape = tensor.shape if shape is None else shape
        if tensor.dim() != 1 or tensor.shape != shape:
            expected = f"shape (N,), the same for all ({tuple(shape)})"
            raise ArgumentError(message(name, argument, expected, f"shape {tuple(tensor.shape)}"))
    return [tensor.float() for tensor in given.values()]


def _reduce(name: str, losses: Tensor, reduction: str, num_items: int | Tensor | None) -> Tensor:
    choice("reduction", reduction, ("mean", "sum", "none"))
    if num_items is not None and reduction != "mean":
        raise ArgumentError(message(name, "num_items", 'None unless reduction is "mean"', repr(num_items)))
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    divisor = losses.numel() if num_items is None else num_items
    return losses.sum() / torch.as_tensor(divisor, device=losses.device).clamp(min=1)


def _smoothed(margin: Tensor, smoothing: float) -> Tensor:
    return -(1.0 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
) -> PreferenceLoss:
    r"""Direct preference optimization.

    $$\Delta = (\log p_c - \log r_c) - (\log p_r - \log r_r), \quad
      \ell = -(1 - \epsilon) \log \sigma(\beta \Delta) - \epsilon \log \sigma(-\beta \Delta)$$

    "hinge": `max(0, 1 - beta * Delta)` (SLiC); "ipo": `(Delta - 1 / (2 beta))^2`, for which the four are
    averages per token (`sequence_logprobs(average=True)`). While policy and reference are equal, the sigmoid
    loss is ln 2 and both rewards are 0. Large margins are as exact as small ones.

    Args:
        policy_chosen: `(N,)` log-probabilities of the chosen answers, with a graph; any floating dtype.
        policy_rejected: Those of the rejected answers.
        reference_chosen: The reference's, see `ts_hf.reference_logprobs`; no gradient goes there.
        reference_rejected: Those of the rejected answers.
        beta: Strength, > 0.
        label_smoothing: Share of pairs expected to be the wrong way round, 0 to 0.5 ("sigmoid" only).
        loss_type: "sigmoid", "hinge" or "ipo".
        reduction: "mean", "sum" or "none".
        num_items: Divisor of "mean": the pairs of a whole step, where it is cut into micro-batches.

    Returns:
        The loss; the rewards are `beta * (policy - reference)`.

    Raises:
        ArgumentTypeError: No floating-point tensors.
        ArgumentError: Shapes that differ.
        OptionError: An option outside its range.

    Example:
        >>> values = torch.tensor([-3.0])
        >>> round(dpo_loss(values, values - 1, values, values - 1).loss.item(), 4)
        0.6931

    Source: arXiv:2305.18290; smoothing: https://ericmitchell.ai/cdpo.pdf; IPO: arXiv:2310.12036.
    """
    name = "dpo_loss"
    chosen, rejected, *references = _check(
        name, policy_chosen=policy_chosen, policy_rejected=policy_rejected, reference_chosen=reference_chosen,
        reference_rejected=reference_rejected,
    )  # fmt: skip
    beta = number("beta", beta, above=0.0)
    smoothing = number("label_smoothing", label_smoothing, minimum=0.0, maximum=0.5)
    choice("loss_type", loss_type, ("sigmoid", "hinge", "ipo"))
    if smoothing and loss_type != "sigmoid":
        raise ArgumentError(message(name, "label_smoothing", f"0 with loss_type={loss_type!r}", smoothing))
    chosen, rejected = chosen - references[0].detach(), rejected - references[1].detach()
    delta = chosen - rejected
    if loss_type == "sigmoid":
        losses = _smoothed(beta * delta, smoothing)
    elif loss_type == "hinge":
        losses = torch.relu(1.0 - beta * delta)
    else:
        losses = (delta - 1.0 / (2.0 * beta)).square()
    loss = _reduce(name, losses, reduction, num_items)
    return PreferenceLoss(loss, beta * chosen.detach(), beta * rejected.detach())


def _log_odds(logprob: Tensor) -> Tensor:
    """`log(p / (1 - p))`; a sequence that is certain (or empty) counts as the next number below certain."""
    below = logprob.clamp(max=-torch.finfo(torch.float32).eps)
    # log(1 - e^x), each form where it is exact; the other branch's input stays inside its domain for autograd
    near = torch.log(-torch.expm1(below.clamp(min=-0.7)))
    far = torch.log1p(-torch.exp(below.clamp(max=-0.69)))
    return below - torch.where(below > -0.6931, near, far)


def orpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    chosen_nll: Tensor,
    *,
    beta: float = 0.1,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
) -> PreferenceLoss:
    r"""Odds-ratio preference optimization: no reference model.

    $$\ell = \mathrm{nll} - \beta \log \sigma\left(
      \log \frac{p_c}{1 - p_c} - \log \frac{p_r}{1 - p_r}\right)$$

    Args:
        chosen: `(N,)` average log-probability per token of the chosen answers
            (`sequence_logprobs(average=True)`).
        rejected: Those of the rejected answers.
        chosen_nll: The language-model loss of the chosen ones: 0-dimensional (such as `causal_lm_loss`), or
            `(N,)`; it is added to the reduced loss, or to each one.
        beta: Weight of the odds ratio, > 0.
        reduction: "mean", "sum" or "none" of the odds ratios (and of `chosen_nll` if it has `(N,)`).
        num_items: Divisor of "mean".

    Returns:
        The loss; the rewards are `beta` times the log-probabilities.

    Raises:
        ArgumentTypeError: No floating-point tensors.
        ArgumentError: Shapes that do not fit.
        OptionError: An option outside its range.

    Example:
        >>> values = torch.tensor([-1.0])
        >>> round(orpo_loss(values, values, torch.tensor(0.0), beta=1.0).loss.item(), 4)
        0.6931

    Source: arXiv:2403.07691.
    """
    name = "orpo_loss"
    chosen, rejected = _check(name, chosen=chosen, rejected=rejected)
    beta = number("beta", beta, above=0.0)
    losses = -beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    if not isinstance(chosen_nll, Tensor) or chosen_nll.shape not in (torch.Size(), losses.shape):
        given = f"shape {tuple(chosen_nll.shape)}" if isinstance(chosen_nll, Tensor) else repr(chosen_nll)
        raise ArgumentError(message(name, "chosen_nll", f"a scalar or shape {tuple(losses.shape)}", given))
    if chosen_nll.dim():
        loss = _reduce(name, losses + chosen_nll, reduction, num_items)
    else:
        loss = _reduce(name, losses, reduction, num_items) + chosen_nll
    return PreferenceLoss(loss, beta * chosen.detach(), beta * rejected.detach())


def simpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
) -> PreferenceLoss:
    r"""Simple preference optimization: length-normalized, with a margin and no reference model.

    $$m = \beta (\log p_c - \log p_r) - \gamma, \quad
      \ell = -(1 - \epsilon) \log \sigma(m) - \epsilon \log \sigma(-m)$$

    Args:
        chosen: `(N,)` average log-probability per token of the chosen answers
            (`sequence_logprobs(average=True)`).
        rejected: Those of the rejected answers.
        beta: Strength, > 0.
        gamma: Margin, >= 0.
        label_smoothing: 0 to 0.5.
        reduction: "mean", "sum" or "none".
        num_items: Divisor of "mean".

    Returns:
        The loss; the rewards are `beta` times the averages.

    Raises:
        ArgumentTypeError: No floating-point tensors.
        ArgumentError: Shapes that differ.
        OptionError: An option outside its range.

    Example:
        >>> values = torch.tensor([-1.0])
        >>> round(simpo_loss(values, values, gamma=0.0).loss.item(), 4)
        0.6931

    Source: arXiv:2405.14734.
    """
    name = "simpo_loss"
    chosen, rejected = _check(name, chosen=chosen, rejected=rejected)
    beta = number("beta", beta, above=0.0)
    margin = number("gamma", gamma, minimum=0.0)
    smoothing = number("label_smoothing", label_smoothing, minimum=0.0, maximum=0.5)
    losses = _smoothed(beta * (chosen - rejected) - margin, smoothing)
    loss = _reduce(name, losses, reduction, num_items)
    return PreferenceLoss(loss, beta * chosen.detach(), beta * rejected.detach())


def kto_loss(
    policy: Tensor,
    reference: Tensor,
    desirable: Tensor,
    *,
    kl: float | Tensor = 0.0,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
) -> PreferenceLoss:
    r"""Kahneman-Tversky optimization: single answers, each good or bad.

    $$z = \max(0, \mathrm{kl}), \quad
      \ell = \begin{cases} w_d (1 - \sigma(\beta (\log p - \log r - z))) & \text{good} \\
                           w_u (1 - \sigma(\beta (z - \log p + \log r))) & \text{bad} \end{cases}$$

    Args:
        policy: `(N,)` log-probabilities of the answers, with a graph.
        reference: The reference's; no gradient goes there.
        desirable: `(N,)` bool: whether an answer is good.
        kl: Estimate of the divergence from the reference: the mean of `policy - reference` over answers to
            other prompts. No gradient goes there.
        beta: Strength, > 0.
        desirable_weight: Weight of good answers, >= 0.
        undesirable_weight: Weight of bad answers, >= 0.
        reduction: "mean", "sum" or "none".
        num_items: Divisor of "mean".

    Returns:
        The loss; `chosen_rewards` and `rejected_rewards` are `beta * (policy - reference)` of the good and of
        the bad answers.

    Raises:
        ArgumentTypeError: No floating-point tensors, or `desirable` not bool.
        ArgumentError: Shapes that do not fit.
        OptionError: An option outside its range.

    Example:
        >>> values = torch.tensor([-1.0, -2.0])
        >>> kto_loss(values, values, torch.tensor([True, False])).loss.item()
        0.5

    Source: arXiv:2402.01306.
    """
    name = "kto_loss"
    policy, reference = _check(name, policy=policy, reference=reference)
    if not isinstance(desirable, Tensor) or desirable.dtype != torch.bool:
        given = str(getattr(desirable, "dtype", type(desirable).__name__))
        raise ArgumentTypeError(message(name, "desirable", "a bool tensor", given))
    if desirable.shape != policy.shape:
        shape = f"shape {tuple(desirable.shape)}"
        raise ArgumentError(message(name, "desirable", f"shape {tuple(policy.shape)}", shape))
    if isinstance(kl, Tensor) and kl.numel() != 1:
        raise ArgumentError(message(name, "kl", "one number", f"shape {tuple(kl.shape)}"))
    beta = number("beta", beta, above=0.0)
    good = number("desirable_weight", desirable_weight, minimum=0.0)
    bad = number("undesirable_weight", undesirable_weight, minimum=0.0)
    point = torch.as_tensor(kl, dtype=torch.float32, device=policy.device).detach().reshape(()).clamp(min=0.0)
    ratio = policy - reference.detach()
    sign = torch.where(desirable, 1.0, -1.0)
    # 1 - sigmoid(x) = sigmoid(-x), which does not cancel
    losses = torch.where(desirable, good, bad) * torch.sigmoid(-beta * sign * (ratio - point))
    rewards = beta * ratio.detach()
    loss = _reduce(name, losses, reduction, num_items)
    return PreferenceLoss(loss, rewards[desirable], rewards[~desirable])
