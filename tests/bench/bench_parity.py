"""Print the table of max relative errors: `make bench-parity`.

Runs every parity case of the ops and of the model on the CPU; exits 1 if a bound is exceeded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator


def cases() -> Iterator[object]:
    """All rows, as they are computed."""
    import torch

    from tests.support import parity_model as model
    from tests.support import parity_ops as ops

    for kind in ops.DECAYS:
        for length in ops.KDA_LENGTHS:
            yield from ops.kda_rows((length,), kind)
        yield from ops.kda_rows((1, 64, 65, 2, 130, 63), kind)
    yield from ops.gate_rows()
    for num_sources in (1, 2, 5, 9):
        yield from ops.attnres_rows(num_sources)
    for dtype in (torch.float64, torch.float32):
        yield from model.reference_rows(dtype)
        yield from model.mla_rows(dtype)
    yield from model.split_rows()
    yield from model.packed_rows()
    yield from model.checkpointed_rows()


def main() -> int:
    """Print the rows; 0 if all are within their bounds."""
    failed = 0
    print(f"{'case':<36} {'against':<62} {'max rel err':>11} {'bound':>8}")
    for row in cases():
        mark = "" if row.ok else "  EXCEEDED"  # type: ignore[attr-defined]
        failed += bool(mark)
        print(
            f"{row.case:<36} {row.what:<62} {row.error:>11.1e} {row.bound:>8.0e}{mark}", flush=True
        )  # type: ignore[attr-defined]
    print(f"{failed} bounds exceeded" if failed else "all within bounds")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
