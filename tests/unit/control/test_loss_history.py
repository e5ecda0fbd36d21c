"""The training curve of the status: whole, bounded, and true after a restart."""

from __future__ import annotations

from k3ray.control.loss_history import MAX_POINTS, with_history


def test_history_spans_the_run_within_its_bound() -> None:
    seen = None
    for step in range(1, 2000):
        seen = with_history(seen, {"step": step, "loss": 1.0 / step})
        assert len(seen["loss_history"]) <= MAX_POINTS
    history = seen["loss_history"]
    assert history[0] == (1, 1.0)
    assert history[-1] == (1999, 1.0 / 1999)
    assert [point[0] for point in history] == sorted({point[0] for point in history})


def test_a_step_reported_again_replaces_what_followed() -> None:
    seen = None
    for step, loss in [(1, 5.0), (2, 4.0), (3, 3.0), (2, 4.5)]:
        seen = with_history(seen, {"step": step, "loss": loss})
    assert seen["loss_history"] == [(1, 5.0), (2, 4.5)]


def test_reports_without_loss_keep_the_curve() -> None:
    seen = with_history(None, {"step": 1, "loss": 5.0})
    assert with_history(seen, {"note": "saving"}) == {"note": "saving", "loss_history": [(1, 5.0)]}
