"""AdamW into a shadow: new parameter and moments beside the old ones, which stay as they are.

The operations and their order are torch.optim.AdamW's (single tensor, not fused), so the results
are equal bit for bit; each writes straight into the shadow, since an optimizer step is bound by
memory traffic. All float32; gradients may be scaled first (clipping).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k3ray.train.step_tag import UpdatePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamState:
    """A parameter with its moments; three tensors of one shape."""

    master: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor


def adamw_into(
    out: AdamState, old: AdamState, grad: torch.Tensor, plan: UpdatePlan, *, decay: bool = True
) -> None:
    """Write the updated `old` into `out`; `old` and `grad` are not changed.

    Args:
        out: Shadow buffers, overwritten.
        old: Committed parameter and moments.
        grad: Gradient, scaled by `plan.grad_scale` on the way.
        plan: The update.
        decay: Whether weight decay applies to this parameter.
    """
    if plan.skip:
        for target, source in ((out.master, old.master), (out.m, old.m), (out.v, old.v)):
            target.copy_(source)
        return
    if plan.grad_scale != 1.0:
        grad = grad * plan.grad_scale
    step = plan.num_updates + 1
    torch.lerp(old.m, grad, 1 - plan.beta1, out=out.m)
    torch.mul(old.v, plan.beta2, out=out.v).addcmul_(grad, grad, value=1 - plan.beta2)
    step_size = plan.lr / (1 - plan.beta1**step)
    root = (1 - plan.beta2**step) ** 0.5
    denominator = out.v.sqrt().div_(root).add_(plan.eps)
    kept = 1 - plan.lr * plan.weight_decay if decay else 1.0
    torch.mul(old.master, kept, out=out.master).addcdiv_(out.m, denominator, value=-step_size)
