"""The plan's arithmetic against the model's own state, the release, and the command's exit."""

from __future__ import annotations

import json

import pytest

from k3ray.cli.main import main
from k3ray.config.numeric import NumericMode
from k3ray.config.presets import PRESETS
from k3ray.errors import PlacementError
from k3ray.model.serve_state import ServeState
from k3ray.placement.memory_plan import (
    GIB,
    Offer,
    cache_bytes_per_token,
    plan_serving,
    plan_training,
    request_state,
)


@pytest.mark.parametrize("preset", ["k3-tiny", "k3-nano", "k3-bench28", "k3-mini"])
@pytest.mark.parametrize("numeric", NumericMode)
def test_cache_and_state_are_what_the_engine_allocates(preset: str, numeric: NumericMode) -> None:
    cfg = PRESETS[preset].text_config
    state = ServeState(cfg, num_slots=3, num_pages=5, numeric=numeric)
    pages = 5 * 64 * cache_bytes_per_token(cfg, 4)
    assert state.size_bytes == pages + 3 * request_state(cfg, 4, numeric).total


def test_the_release(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--preset", "kimi-k3", "--json"])
    assert ended.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["parameters"] == {
        "text": 2_779_484_476_000, "vision_tower": 401_214_464, "projector": 46_144_512,
        "active": 104_189_612_640, "routed_experts": 2_722_740_830_208, "dense": 56_743_645_792,
    }  # fmt: skip
    assert document["checkpoint_bytes"]["mxfp4"] == 1_560_860_324_864
    assert document["cache_bytes_per_token"] == 27_648
    assert document["state_bytes_per_request"]["recurrent"] == 434_110_464


def test_what_does_not_fit_says_the_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PlacementError, match=r"168\.39 GiB"):
        _ = main_raising(["plan", "--accelerators", "8"])
    assert "DOES NOT FIT" in capsys.readouterr().out
    assert main(["plan", "--accelerators", "8"]) == 2


def main_raising(arguments: list[str]) -> object:
    from k3ray.cli.main import build_app

    return build_app("plan")(args=arguments, prog_name="k3ray", standalone_mode=False)


@pytest.mark.parametrize("accelerators", [1, 7, 16, 64, 97])
def test_more_memory_never_needs_more(accelerators: int) -> None:
    model = PRESETS["kimi-k3"]
    seen_fit, needed = False, None
    for hbm in (16, 80, 141, 288, 2000, 8000):
        offer = Offer(accelerators=accelerators, hbm_bytes=hbm * GIB, host_bytes=1000 * GIB)
        serving, training = plan_serving(model, offer), plan_training(model, offer)
        assert accelerators % serving.stack_ranks == 0
        assert serving.fits or not seen_fit
        assert needed is None or training.min_accelerators <= needed
        seen_fit, needed = serving.fits, training.min_accelerators
