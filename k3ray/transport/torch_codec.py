"""Torch tensors as the transport's arrays and back, sharing memory both ways.

numpy has no bfloat16: such tensors travel as uint16 and the receiver names the dtype. Received
arrays are read-only by contract; the tensors made from them must not be written to either.
"""

from __future__ import annotations

import numpy as np
import torch

from k3ray.transport.protocol import Array


class _WritableAlias:
    """The same memory without the read-only flag, which torch would warn about at each tensor."""

    def __init__(self, array: Array) -> None:
        self._owner = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def to_array(tensor: torch.Tensor) -> Array:
    """The tensor's memory as an array.

    Args:
        tensor: any shape and dtype, detached or not; copied only if it is on a device or not
            contiguous. Must not change until the reply to its message has arrived.

    Returns:
        Same shape; bfloat16 becomes uint16.
    """
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: Array = tensor.numpy()
    return array


def from_array(array: Array, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor on the array's memory; reinterpreted as `dtype` if given (bfloat16 from uint16)."""
    if not array.flags.writeable and array.size:
        array = np.asarray(_WritableAlias(array))
    tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.view(dtype)
