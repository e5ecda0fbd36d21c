"""Does this process keep the promise of deterministic mode? Checked at start, told to all peers.

Every matrix shape and row operation of a config runs on 64 rows, then on the first and the last
n rows for n = 1..63: a row must have the same bits every time. The digest of the 64-row results
says which bits they are; two processes with different digests (another CPU, another torch) would
mix two roundings in one answer, and the transport refuses to connect them.

Source: design, section 5, "Rows".
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from k3ray.config.model import TextConfig
from k3ray.config.numeric import NumericMode
from k3ray.errors import NumericError
from k3ray.ids import Role
from k3ray.model.k3 import K3Model
from k3ray.model.modules import Linear
from k3ray.ops.activation import sigmoid, silu, situ_glu
from k3ray.ops.attention import paged_attention
from k3ray.ops.attnres import attnres_mix
from k3ray.ops.kda import kda_chunkwise, kda_gate
from k3ray.ops.linear import row_bmm, row_linear
from k3ray.ops.logprobs import token_logprobs
from k3ray.ops.norm import l2_norm, rms_norm
from k3ray.ops.ragged import CHUNK, RaggedLayout, build_layout
from k3ray.ops.routing import combine, route
from k3ray.ops.short_conv import short_conv
from k3ray.transport.code_digest import process_digest

ROWS = CHUNK
MAX_ELEMENTS = 1 << 22
"""Larger matrices are cut to their first columns of results: the kernels work in tiles."""


class Check(NamedTuple):
    """An operation on rows.

    Args:
        run: Rows of the operands -> one result row each.
        from_start: Whether rows depend on earlier ones (a sequence), so that only first rows can
            be checked.
        in_groups: Whether expert groups compute it.
    """

    name: str
    run: Callable[[slice], torch.Tensor]
    from_start: bool = False
    in_groups: bool = False


@functools.cache
def handshake_digest(
    cfg: TextConfig, numeric: NumericMode, role: Role = Role.ATTENTION_STACK
) -> str:
    """Run the self-test of a model in this process, once; what the process shows to its peers.

    The digest is the same for all roles; rows are checked of what the role computes.

    Args:
        cfg: Whose shapes are tested.
        numeric: In fast mode nothing is promised and nothing is tested.
        role: Who asks; expert groups, whose start somebody waits for, check their products only.

    Raises:
        NumericError: a row's bits depend on its mates, or intra-op threads are not 1.
    """
    if numeric is not NumericMode.DETERMINISTIC:
        return process_digest()
    if torch.get_num_threads() != 1:
        raise NumericError(
            f"deterministic mode runs on one intra-op thread, this process has "
            f"{torch.get_num_threads()}",
            remedy="call torch.set_num_threads(1) first, or use numeric_mode=fast",
        )
    digest = hashlib.blake2b(digest_size=8)
    with torch.inference_mode():
        for check in checks(cfg):
            whole = check.run(slice(0, ROWS))
            digest.update(check.name.encode())
            digest.update(whole.contiguous().numpy().tobytes())
            if role is not Role.EXPERT_GROUP or check.in_groups:
                require_same_rows(check, whole)
    return process_digest(digest.hexdigest())


def require_same_rows(check: Check, whole: torch.Tensor) -> None:
    """Run the check on the first and the last n rows for all n.

    Args:
        whole: Its results for all rows.

    Raises:
        NumericError: a row changed bits.
    """
    for rows in range(1, ROWS):
        spans = [slice(0, rows)]
        if not check.from_start:
            spans.append(slice(ROWS - rows, ROWS))
        for span in spans:
            if not torch.equal(check.run(span), whole[span]):
                raise NumericError(
                    f"{check.name}: a row has other bits among {rows} rows than among {ROWS}",
                    remedy="report CPU and torch version; numeric_mode=fast works meanwhile",
                )


def checks(cfg: TextConfig) -> Iterator[Check]:
    """Every matrix shape and operation of the config."""
    noise = torch.Generator().manual_seed(20260)

    def data(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise)

    yield from _matrices(cfg, data)
    yield from _row_ops(cfg, data)
    yield from _sequence_ops(cfg, data)


_Data = Callable[..., torch.Tensor]


def _matrices(cfg: TextConfig, data: _Data) -> Iterator[Check]:
    model = K3Model(cfg, device="meta")
    shapes = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, Linear)}
    inner, latent = cfg.moe_intermediate_size, cfg.routed_expert_hidden_size
    of_experts = {(inner, latent), (latent, inner)}
    for outputs, inputs in sorted(shapes | of_experts):
        x_TI = data(ROWS, inputs)
        weight_OI = data(min(outputs, max(1, MAX_ELEMENTS // inputs)), inputs)
        yield Check(
            f"linear {outputs}x{inputs}", _on_rows(row_linear, x_TI, weight_OI),
            in_groups=(outputs, inputs) in of_experts,
        )  # fmt: skip
    heads, rank = cfg.num_attention_heads, cfg.kv_lora_rank
    for inputs, outputs in ((cfg.qk_nope_head_dim, rank), (rank, cfg.v_head_dim)):
        x_BTI, weight_BIO = data(heads, ROWS, inputs), data(heads, inputs, outputs)
        yield Check(f"bmm {heads}x{inputs}x{outputs}", _products(x_BTI, weight_BIO))


def _products(x_BTI: torch.Tensor, weight_BIO: torch.Tensor) -> Callable[[slice], torch.Tensor]:
    return lambda rows: row_bmm(x_BTI[:, rows], weight_BIO).transpose(0, 1)


def _row_ops(cfg: TextConfig, data: _Data) -> Iterator[Check]:
    width, latent = cfg.hidden_size, cfg.routed_expert_hidden_size
    linear = cfg.linear_attn_config
    heads, head_dim = linear.num_heads, linear.head_dim
    x_TX, scale_X = data(ROWS, width), data(width)
    wide_TF = [data(ROWS, cfg.moe_intermediate_size) * 4 for _ in range(2)]
    situ = functools.partial(
        situ_glu, beta=cfg.activation_situ_beta, linear_beta=cfg.activation_situ_linear_beta
    )
    mla_TX = data(ROWS, cfg.num_attention_heads * cfg.v_head_dim)
    gate_THK, a_log_H = data(ROWS, heads, head_dim), data(heads)
    gate = functools.partial(kda_gate, lower_bound=linear.gate_lower_bound)
    top_k, num_experts = cfg.num_experts_per_token, cfg.num_experts
    logits_TE, bias_E = data(ROWS, num_experts), data(num_experts)
    picked_TKL, weights_TK = data(ROWS, top_k, latent), data(ROWS, top_k)
    sources = [data(ROWS, width) for _ in range(5)]
    logits_TV = data(ROWS, min(cfg.vocab_size, MAX_ELEMENTS // ROWS)).numpy()
    targets_T = np.arange(ROWS, dtype=np.int64)
    norm = functools.partial(rms_norm, eps=cfg.rms_norm_eps)
    yield Check("rms_norm", _on_rows(norm, x_TX, scale_X))
    yield Check("l2_norm", _on_rows(l2_norm, gate_THK))
    yield Check("silu", _on_rows(silu, x_TX))
    yield Check("sigmoid", _on_rows(sigmoid, mla_TX))
    yield Check("situ_glu", lambda rows: situ(wide_TF[0][rows], wide_TF[1][rows]), in_groups=True)
    yield Check("kda_gate", _on_rows(gate, gate_THK, a_log_H))
    yield Check("route ids", lambda rows: route(logits_TE[rows], bias_E, top_k=top_k)[0])
    yield Check("route", lambda rows: route(logits_TE[rows], bias_E, top_k=top_k)[1])
    yield Check("combine", lambda rows: combine(picked_TKL[rows], weights_TK[rows]))
    yield Check("attnres", lambda rows: attnres_mix([s[rows] for s in sources], scale_X))
    yield Check(
        "log_softmax",
        lambda rows: torch.from_numpy(token_logprobs(logits_TV[rows], targets_T[rows])),
    )


def _sequence_ops(cfg: TextConfig, data: _Data) -> Iterator[Check]:
    linear = cfg.linear_attn_config
    heads, head_dim = linear.num_heads, linear.head_dim
    channels = heads * head_dim
    taps = linear.short_conv_kernel_size - 1
    x_TC, weight_CJ = data(ROWS, channels), data(channels, taps + 1)
    q, k, v = (data(ROWS, heads, head_dim) for _ in range(3))
    g, beta = -data(ROWS, heads, head_dim).abs(), data(ROWS, heads).sigmoid()
    state = data(1, heads, head_dim, head_dim)
    mla_heads = cfg.num_attention_heads
    width = cfg.kv_lora_rank + cfg.qk_rope_head_dim
    query_SLHC, pages_SPJC = data(1, ROWS, mla_heads, width), data(1, 2, CHUNK, width)
    positions_SL = torch.arange(ROWS)[None] + CHUNK // 2

    def layout(rows: slice) -> RaggedLayout:
        return build_layout((0, rows.stop), taps=taps)

    yield Check(
        "short_conv",
        lambda rows: short_conv(x_TC[rows], weight_CJ, layout=layout(rows)),
        from_start=True,
    )
    yield Check(
        "kda",
        lambda rows: kda_chunkwise(
            *(each[rows] for each in (q, k, v, g, beta)),
            layout=layout(rows), state_DHKV=state,
        )[0],
        from_start=True,
    )  # fmt: skip
    yield Check(
        "attention",
        lambda rows: paged_attention(
            query_SLHC[:, rows], pages_SPJC, positions_SL[:, rows],
            latent_dim=cfg.kv_lora_rank, scale=0.1,
        )[0],
    )  # fmt: skip


def _on_rows(op: Callable[..., torch.Tensor], x: torch.Tensor, *rest: torch.Tensor) -> Callable[
    [slice], torch.Tensor
]:  # fmt: skip
    return lambda rows: op(x[rows], *rest)
