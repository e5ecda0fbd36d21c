"""Tensors of a checkpoint in the release's layout, to and from what the model computes with.

The model's names are the release's without `language_model.`; A_log is padded with zeros to 128
heads on disk; routed experts are dequantised when read and quantised when written, by the same
functions that training and serving use. A tensor with a NaN, an infinity or the NaN scale is
refused. Legend: E8M0 scales are bytes, see `ops.mxfp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch

from k3ray.config.model import ModelConfig, TextConfig
from k3ray.config.numeric import ExpertFormat
from k3ray.errors import CheckpointError
from k3ray.model.init import keyed_generator
from k3ray.model.k3 import K3Model
from k3ray.ops.mxfp import NAN_SCALE, mxfp4_dequantize, mxfp4_quantize
from k3ray.weights.checkpoint import Checkpoint
from k3ray.weights.names import expert_tensor_names, parse_expert_tensor
from k3ray.weights.release_layout import TEXT_PREFIX, TensorSpec
from k3ray.weights.safetensors_io import ReadBytes

PACKED, SCALE = ".weight_packed", ".weight_scale"

ReadTensor = Callable[[str], torch.Tensor]
"""Gives a text tensor by the model's own name."""

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}


def from_bytes(spec: TensorSpec, data: bytearray) -> torch.Tensor:
    """The tensor of a spec over `data`, in the stored dtype."""
    return torch.frombuffer(data, dtype=_DTYPES[spec.dtype]).view(spec.shape)


def to_bytes(tensor: torch.Tensor, spec: TensorSpec) -> memoryview:
    """The bytes of a tensor in the dtype of `spec`, rounded to nearest where it is narrower.

    Raises:
        ValueError: the shape is another one.
    """
    if tuple(tensor.shape) != spec.shape:
        raise ValueError(f"{spec.name}: {tuple(tensor.shape)} against {spec.shape}")
    stored = tensor.detach().cpu().to(_DTYPES[spec.dtype]).contiguous()
    data: memoryview = stored.view(torch.uint8).numpy().reshape(-1).data
    return data


def read_dense(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Everything an attention stack holds, float32, by the model's names.

    Raises:
        CheckpointError: `kind` "number": a value is not finite.
    """
    heads = checkpoint.model.text_config.linear_attn_config.num_heads
    tensors = {}
    for name in checkpoint.tensors:
        own = name.removeprefix(TEXT_PREFIX)
        if own == name or ".experts." in name:
            continue
        tensor = _finite(checkpoint, name).float()
        tensors[own] = tensor[:heads].clone() if name.endswith(".A_log") else tensor
    return tensors


def read_expert(checkpoint: Checkpoint, layer: int, expert: int) -> dict[str, torch.Tensor]:
    """The three matrices of a routed expert, float32, by the model's names.

    Raises:
        CheckpointError: `kind` "number": a value or a scale is not finite.
    """
    return {name: read_matrix(checkpoint, name) for name in expert_tensor_names(layer, expert)}


def read_matrix(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """One matrix of a routed expert by the model's name, float32."""
    stem = TEXT_PREFIX + name.removesuffix(".weight")
    if checkpoint.experts is not ExpertFormat.MXFP4:
        return _finite(checkpoint, f"{stem}.weight").float()
    packed = from_bytes(checkpoint.spec(stem + PACKED), checkpoint.read(stem + PACKED))
    scales = from_bytes(checkpoint.spec(stem + SCALE), checkpoint.read(stem + SCALE))
    matrix = mxfp4_dequantize(packed, scales)
    if bool((scales == NAN_SCALE).any()) or not bool(torch.isfinite(matrix).all()):
        raise _bad_number(checkpoint, stem + SCALE)
    return matrix


def check_numbers(checkpoint: Checkpoint) -> Iterator[TensorSpec]:
    """Read every tensor once, yielding its spec when it is all right; one is in memory at a time.

    Raises:
        CheckpointError: `kind` "number", or a file that cannot be read.
    """
    for spec in checkpoint.by_file():
        if spec.dtype == "U8":
            _check_codes(checkpoint, spec)
        else:
            _finite(checkpoint, spec.name)
        yield spec


def same_bytes(checkpoint: Checkpoint) -> ReadBytes:
    """A source for a copy in the same format: every byte as it is.

    Raises (when read):
        CheckpointError: `kind` "number": a value is not finite.
    """
    return lambda spec: _checked_bytes(checkpoint, spec)


def converted(checkpoint: Checkpoint) -> ReadBytes:
    """A source for a copy with the experts in another format; all else byte for byte.

    Raises (when read):
        CheckpointError: `kind` "number": a value is not finite.
    """
    experts = source_of(lambda name: read_matrix(checkpoint, name))

    def read(spec: TensorSpec) -> bytes | bytearray | memoryview:
        return experts(spec) if ".experts." in spec.name else _checked_bytes(checkpoint, spec)

    return read


def source_of(read_tensor: ReadTensor) -> ReadBytes:
    """A source of text tensors in any format from float32 ones by the model's names.

    Args:
        read_tensor: Asked once for a matrix that is packed: its codes and scales are neighbours.
    """

    @lru_cache(maxsize=1)
    def packed(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return mxfp4_quantize(read_tensor(name))

    def read(spec: TensorSpec) -> memoryview:
        own = spec.name.removeprefix(TEXT_PREFIX)
        for part, suffix in enumerate((PACKED, SCALE)):
            if own.endswith(suffix):
                return to_bytes(packed(own.replace(suffix, ".weight"))[part], spec)
        tensor = read_tensor(own)
        if own.endswith(".A_log"):
            tensor = torch.cat((tensor, tensor.new_zeros(spec.shape[0] - len(tensor))))
        return to_bytes(tensor, spec)

    return read


def random_source(model: ModelConfig, seed: int) -> ReadBytes:
    """Random weights, every tensor away from its neutral value; depends on seed and names only.

    Linear weights have a deviation of 1/sqrt(inputs), so that all parts of the model matter;
    norms are near 1, the rest small around 0. Vision tensors are random, too.
    """
    text = source_of(lambda name: _random_text(model.text_config, seed, name))

    def read(spec: TensorSpec) -> bytes | bytearray | memoryview:
        if spec.name.startswith(TEXT_PREFIX):
            return text(spec)
        values = torch.randn(spec.shape, generator=_generator(seed, spec.name))
        return to_bytes(values * 0.02, spec)

    return read


def _random_text(cfg: TextConfig, seed: int, name: str) -> torch.Tensor:
    generator = _generator(seed, name)
    found = parse_expert_tensor(name)
    if found is None:
        shape = _dense_shapes(cfg)[name]
    else:
        inner, latent = cfg.moe_intermediate_size, cfg.routed_expert_hidden_size
        shape = (latent, inner) if found.matrix == "w2" else (inner, latent)
    values = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return values.mul_(0.1).add_(1.0)
    if len(shape) == 1:  # A_log, dt_bias, the router's bias
        return values.mul_(0.1)
    return values.mul_(shape[-1] ** -0.5)


@lru_cache(maxsize=4)
def _dense_shapes(cfg: TextConfig) -> dict[str, tuple[int, ...]]:
    model = K3Model(cfg, device="meta")
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _generator(seed: int, name: str) -> torch.Generator:
    return keyed_generator(f"checkpoint/{seed}/{name}")


def _checked_bytes(checkpoint: Checkpoint, spec: TensorSpec) -> bytearray:
    """A tensor's bytes, once its numbers are known to be finite (codes with their scales)."""
    data = checkpoint.read(spec.name)
    if spec.dtype == "U8":
        _check_codes(checkpoint, spec)
    elif not bool(torch.isfinite(from_bytes(spec, data)).all()):
        raise _bad_number(checkpoint, spec.name)
    return data


def _check_codes(checkpoint: Checkpoint, spec: TensorSpec) -> None:
    """Codes are checked with their scales, once, where the scales are."""
    if spec.name.endswith(SCALE):
        read_matrix(checkpoint, spec.name.removeprefix(TEXT_PREFIX).replace(SCALE, ".weight"))


def _finite(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    spec = checkpoint.spec(name)
    return from_bytes(spec, _checked_bytes(checkpoint, spec))


def _bad_number(checkpoint: Checkpoint, name: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.path}: number: {name} has a NaN or an infinity",
        remedy="nothing was loaded; use another checkpoint", kind="number",
        path=str(checkpoint.path), tensor=name,
    )  # fmt: skip
