"""What captured blocks add to a plan: the memory of their recordings, and the copies to and from it.

    bytes = sum over structures of (inputs + outputs + gradients, at fixed addresses) + one pool
    pool  = the largest block's (saved + gradients) + temporaries            on a GPU, where all share it
    pool  = sum over pairs of recordings of all that their operations make   of the stand-in on a CPU

A structure is a class of blocks that are paged or not, and recompute or not. What a kept or offloaded block
saves is copied out, so it is counted with its activations, as without captures.
"""

from __future__ import annotations

import dataclasses

__all__ = ["Recorded", "recorded"]

_ALIGN = 256  # bytes that each tensor at a fixed address starts at a multiple of
_INDICES = 16  # bytes a token of positions and the like
#: Results of all operations of a block, over what autograd keeps of them; the stand-in for graphs holds all.
_FORWARD, _BACKWARD = 3.0, 5.0


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Of one class of blocks, in bytes.

    Attributes:
        fixed: At fixed addresses, of each structure.
        pool: What one pair of recordings needs of the pool that all of them share.
        pair: What one pair holds of its own where nothing is shared, and nothing used twice.
        forward: Copies of one forward pass of a micro-batch.
        backward: The same of a backward pass.
    """

    fixed: float
    pool: float
    pair: float
    forward: float
    backward: float


def recorded(
    hidden: float, saved: float, adapters: float, grads: float, decoded: float, tokens: int
) -> Recorded:
    """Work out what recordings of a class take.

    Args:
        hidden: Bytes of the hidden states of a micro-batch.
        saved: Bytes that autograd keeps of it in a block.
        adapters: Bytes of what is trained and does not leave the device.
        grads: Bytes of the gradients of a block's other weights.
        decoded: Bytes of its packed weights once decoded.
        tokens: Of a micro-batch.

    Example:
        >>> recorded(100.0, 1000.0, 0.0, 0.0, 0.0, 0).forward
        200.0
    """
    # Hidden states, and what comes beside them such as the cosines of positions; their gradient and result.
    inputs = 2 * hidden + _INDICES * tokens
    fixed = inputs + 3 * hidden + 2 * adapters + grads + 64 * _ALIGN
    results = hidden + adapters + grads
    forward = _FORWARD * saved + 4 * hidden + decoded
    backward = _BACKWARD * saved + 4 * hidden + 2 * results + decoded  # at most forward again before it
    return Recorded(
        fixed=fixed,
        pool=saved + results,
        pair=2 * forward + backward,
        forward=2 * hidden + adapters,
        backward=3 * hidden + 2 * adapters + grads,
    )
