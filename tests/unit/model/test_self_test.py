"""The start-up self-test: what it promises, what it finds, and what a process shows its peers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from k3ray.config.numeric import NumericMode
from k3ray.config.presets import PRESETS
from k3ray.errors import NumericError
from k3ray.ids import Role
from k3ray.model import self_test
from k3ray.model.self_test import checks, handshake_digest
from k3ray.transport.code_digest import process_digest

CFG = PRESETS["k3-tiny"].text_config
DETERMINISTIC = NumericMode.DETERMINISTIC


@pytest.fixture(autouse=True)
def _fresh() -> None:
    handshake_digest.cache_clear()


def test_every_process_and_role_shows_the_same() -> None:
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from k3ray.config.presets import PRESETS\n"
        "from k3ray.config.numeric import NumericMode\n"
        "from k3ray.model.self_test import handshake_digest\n"
        "cfg = PRESETS['k3-tiny'].text_config\n"
        "print(handshake_digest(cfg, NumericMode.DETERMINISTIC))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    mine = handshake_digest(CFG, DETERMINISTIC)
    assert other.stdout.strip() == mine
    assert handshake_digest(CFG, DETERMINISTIC, Role.EXPERT_GROUP) == mine
    bits = mine.partition("/")[2]
    assert len(bits) == 16
    assert mine == process_digest(bits)


def test_fast_mode_promises_nothing() -> None:
    assert handshake_digest(CFG, NumericMode.FAST) == process_digest()


def test_other_shapes_have_another_digest() -> None:
    nano = PRESETS["k3-nano"].text_config
    assert handshake_digest(nano, DETERMINISTIC) != handshake_digest(CFG, DETERMINISTIC)


def test_all_matrices_of_model_and_experts_are_checked() -> None:
    names = {check.name for check in checks(CFG)}
    inner, latent = CFG.moe_intermediate_size, CFG.routed_expert_hidden_size
    assert {f"linear {inner}x{latent}", f"linear {latent}x{inner}"} <= names
    assert f"linear {CFG.vocab_size}x{CFG.hidden_size}" in names
    in_groups = {check.name for check in checks(CFG) if check.in_groups}
    assert in_groups == {f"linear {inner}x{latent}", f"linear {latent}x{inner}", "situ_glu"}


def first_rows(x: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """A product without padding, whose rows change bits below 16 of them."""
    return functional.linear(x, weight_OI)


def mean_free(x: torch.Tensor, weight_D: torch.Tensor, *, eps: float) -> torch.Tensor:
    """A norm that looks at all rows."""
    return (x - x.mean()) * weight_D


@pytest.mark.parametrize(
    ("op", "broken", "name"),
    [("row_linear", first_rows, "linear"), ("rms_norm", mean_free, "rms_norm")],
)
def test_an_operation_that_breaks_the_promise_is_named(
    op: str, broken: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, op, broken)
    with pytest.raises(NumericError, match=f"{name}.*other bits among"):
        handshake_digest(CFG, DETERMINISTIC)


def test_another_result_is_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    right = handshake_digest(CFG, DETERMINISTIC)
    handshake_digest.cache_clear()
    monkeypatch.setattr(self_test, "silu", lambda x: functional.silu(x.double()).float())
    assert handshake_digest(CFG, DETERMINISTIC) != right


def test_two_threads_are_refused() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(NumericError, match="one intra-op thread"):
            handshake_digest(CFG, DETERMINISTIC)
    finally:
        torch.set_num_threads(before)
