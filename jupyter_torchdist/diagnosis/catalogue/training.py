"""The training itself, as a strategy of ours tells it in a job's notes."""

from __future__ import annotations

from .kind import Kind, Order

KINDS = (
    Kind(
        "nonfinite-gradients",
        Order.PERFORMANCE,
        "{who} first had gradients that are not finite in {step}, in {layer}.",
        "Some samples, a learning rate that is too high, or an operation without a gradient there (the root of 0, the "
        "logarithm of 0, a division) gave NaN or infinity. Parameters that have taken such a step are lost.",
        "Look at the samples and the layer that the note names. A smaller learning rate, `clip_grad_norm_`, an epsilon "
        "in the operation; `-O nonfinite=stop` ends the job there, `-O nonfinite=skip` leaves such steps out.",
        (
            (
                r"(?P<step>step \d+): the gradients of \d+ of \d+ parameters are not finite, in the backward first "
                r"(?P<layer>[^;]+)(?:.*; from ranks? (?P<culprit>\d+))?.*\. "
                r"The (?:optimizer took them|step was left out)"
            ),
        ),
        severity="warning",
    ),
)
