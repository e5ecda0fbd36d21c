"""Decayed inner products of all pairs of rows of a chunk, and their gradients.

For i >= j the decay between two rows is exp(g_{j+1} + ... + g_i), and every exponent used here is
such a sum of non-positive numbers: nothing can overflow, and no two large sums are subtracted. A
chunk is halved again and again. At half size s, with a row i in a right half and a row j in the
left half beside it, the decay splits at the border into exp(prefix_i) * exp(suffix_j), so the
s x s block of pairs is one matrix product. Sizes 1, 2, ..., 32 cover all pairs below the diagonal;
prefixes and suffixes of size 2s come from those of size s by adding one total.
Legend: N chunks times heads, C rows of a chunk (64), K channels, M blocks of 2s, s half size.
"""

from __future__ import annotations

from typing import Any

import torch

from k3ray.ops.function import call

FLOOR = -80.0
"""Exponents are cut off here: exp(-80) is nothing beside 1, and float32 denormals are slow."""


def chunk_pairs(
    q_NCK: torch.Tensor, k_NCK: torch.Tensor, g_NCK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pair products and the decays to both ends of the chunk.

    Args:
        q_NCK: [N, C, K] queries; C a power of two.
        k_NCK: [N, C, K] keys.
        g_NCK: [N, C, K] log decays, <= 0.

    Returns:
        kk [N, C, C], strictly lower: sum_c k_ic k_jc exp(G_ic - G_jc) for i > j;
        qk [N, C, C], lower: sum_c q_ic k_jc exp(G_ic - G_jc) for i >= j;
        prefix [N, C, K]: G_i, the sum of g up to and with row i;
        suffix [N, C, K]: the sum of g after row i.
    """
    return call(_ChunkPairs, q_NCK, k_NCK, g_NCK)  # type: ignore[no-any-return]


def decay(log_decay: torch.Tensor) -> torch.Tensor:
    """exp of non-positive exponents, cut off at `FLOOR`."""
    return log_decay.clamp(min=FLOOR).exp_()


class _ChunkPairs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_NCK: torch.Tensor, k_NCK: torch.Tensor, g_NCK: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        num, rows, _ = g_NCK.shape
        kk_NCC = g_NCK.new_zeros(num, rows, rows)
        qk_NCC = g_NCK.new_zeros(num, rows, rows)
        qk_NCC.diagonal(dim1=1, dim2=2).copy_((q_NCK * k_NCK).sum(-1))
        prefix_NCK, suffix_NCK = g_NCK.clone(), torch.zeros_like(g_NCK)
        decays = []
        half = 1
        while half < rows:
            decay_NCK = _level_decay(prefix_NCK, suffix_NCK, half)
            decays.append(decay_NCK)
            right_B2sK, left_BsK = _level_operands(q_NCK, k_NCK, decay_NCK, half)
            products = torch.bmm(right_B2sK, left_BsK.transpose(1, 2))
            _lower_blocks(kk_NCC, half).copy_(products[:, :half].view(num, -1, half, half))
            _lower_blocks(qk_NCC, half).copy_(products[:, half:].view(num, -1, half, half))
            _merge(prefix_NCK, suffix_NCK, half)
            half *= 2
        ctx.save_for_backward(q_NCK, k_NCK, *decays)
        return kk_NCC, qk_NCC, prefix_NCK, suffix_NCK

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q_NCK, k_NCK, *decays = ctx.saved_tensors
        dkk_NCC, dqk_NCC = grads[0], grads[1]
        dprefix_NCK, dsuffix_NCK = grads[2].clone(), grads[3].clone()
        ddiagonal_NC1 = dqk_NCC.diagonal(dim1=1, dim2=2).unsqueeze(-1)
        dq_NCK, dk_NCK = ddiagonal_NC1 * k_NCK, ddiagonal_NC1 * q_NCK
        half = q_NCK.shape[1] // 2
        while half >= 1:
            decay_NCK = decays[half.bit_length() - 1]
            _unmerge(dprefix_NCK, dsuffix_NCK, half)
            right_B2sK, left_BsK = _level_operands(q_NCK, k_NCK, decay_NCK, half)
            dproducts = torch.cat(
                (
                    _lower_blocks(dkk_NCC, half).reshape(-1, half, half),
                    _lower_blocks(dqk_NCC, half).reshape(-1, half, half),
                ),
                dim=1,
            )
            dright_B2sK = _small_bmm(dproducts, left_BsK)
            dleft_BsK = _small_bmm(dproducts.transpose(1, 2), right_B2sK)
            _add_level_grads(
                (dq_NCK, dk_NCK, dprefix_NCK, dsuffix_NCK),
                (right_B2sK, left_BsK, dright_B2sK, dleft_BsK),
                decay_NCK,
                half,
            )
            half //= 2
        return dq_NCK, dk_NCK, dprefix_NCK


def _halves(x_NCK: torch.Tensor, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the left and right halves of all blocks of 2*half rows, each [N, M, s, K]."""
    num, rows, channels = x_NCK.shape
    view = x_NCK.view(num, rows // (2 * half), 2, half, channels)
    return view[:, :, 0], view[:, :, 1]


def _lower_blocks(pairs_NCC: torch.Tensor, half: int) -> torch.Tensor:
    """View [N, M, s, s] of the blocks with rows in right halves and columns in left halves."""
    num, rows, _ = pairs_NCC.shape
    stride_n, stride_r, stride_c = pairs_NCC.stride()
    return pairs_NCC.as_strided(
        (num, rows // (2 * half), half, half),
        (stride_n, 2 * half * (stride_r + stride_c), stride_r, stride_c),
        pairs_NCC.storage_offset() + half * stride_r,
    )


def _level_decay(prefix_NCK: torch.Tensor, suffix_NCK: torch.Tensor, half: int) -> torch.Tensor:
    """exp(suffix) in left halves, exp(prefix) in right halves; [N, C, K]."""
    exponent_NCK = torch.empty_like(prefix_NCK)
    left, right = _halves(exponent_NCK, half)
    torch.clamp(_halves(suffix_NCK, half)[0], min=FLOOR, out=left)
    torch.clamp(_halves(prefix_NCK, half)[1], min=FLOOR, out=right)
    return exponent_NCK.exp_()


def _level_operands(
    q_NCK: torch.Tensor, k_NCK: torch.Tensor, decay_NCK: torch.Tensor, half: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decayed keys over decayed queries of right halves [N*M, 2s, K]; keys of left [N*M, s, K]."""
    decay_left, decay_right = _halves(decay_NCK, half)
    k_left, k_right = _halves(k_NCK, half)
    num, blocks, _, channels = k_left.shape
    right = k_NCK.new_empty(num, blocks, 2 * half, channels)
    torch.mul(k_right, decay_right, out=right[:, :, :half])
    torch.mul(_halves(q_NCK, half)[1], decay_right, out=right[:, :, half:])
    return right.flatten(0, 1), (k_left * decay_left).flatten(0, 1)


def _merge(prefix_NCK: torch.Tensor, suffix_NCK: torch.Tensor, half: int) -> None:
    """Prefixes and suffixes within blocks of `half` become those within blocks of 2*half."""
    left, right = _halves(prefix_NCK, half)
    _halves(suffix_NCK, half)[0].add_(right[:, :, -1:])
    right.add_(left[:, :, -1:])


def _unmerge(dprefix_NCK: torch.Tensor, dsuffix_NCK: torch.Tensor, half: int) -> None:
    """The adjoint of `_merge`."""
    left, right = _halves(dprefix_NCK, half)
    left[:, :, -1:].add_(right.sum(2, keepdim=True))
    right[:, :, -1:].add_(_halves(dsuffix_NCK, half)[0].sum(2, keepdim=True))


def _small_bmm(a_BIJ: torch.Tensor, b_BJK: torch.Tensor) -> torch.Tensor:
    """a @ b; the smallest products are written out, which is several times faster on a CPU."""
    rows, terms = a_BIJ.shape[1:]
    if rows * terms > 8:
        return torch.bmm(a_BIJ, b_BJK)
    total = a_BIJ[:, :, :1] * b_BJK[:, :1]
    for term in range(1, terms):
        total.addcmul_(a_BIJ[:, :, term : term + 1], b_BJK[:, term : term + 1])
    return total


def _add_level_grads(
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    decay_NCK: torch.Tensor,
    half: int,
) -> None:
    """Add one level's part to the gradients of q, k, prefix and suffix, in place."""
    dq_NCK, dk_NCK, dprefix_NCK, dsuffix_NCK = grads
    right, left, dright, dleft = operands
    num, blocks = decay_NCK.shape[0], decay_NCK.shape[1] // (2 * half)
    decay_left, decay_right = _halves(decay_NCK, half)
    dright = dright.view(num, blocks, 2, half, -1)
    dleft = dleft.view(num, blocks, half, -1)
    dk_left, dk_right = _halves(dk_NCK, half)
    dk_left.addcmul_(dleft, decay_left)
    dk_right.addcmul_(dright[:, :, 0], decay_right)
    _halves(dq_NCK, half)[1].addcmul_(dright[:, :, 1], decay_right)
    right = right.view_as(dright)
    dprefix_right = _halves(dprefix_NCK, half)[1]
    dprefix_right.addcmul_(dright[:, :, 0], right[:, :, 0])
    dprefix_right.addcmul_(dright[:, :, 1], right[:, :, 1])
    _halves(dsuffix_NCK, half)[0].addcmul_(dleft, left.view_as(dleft))
