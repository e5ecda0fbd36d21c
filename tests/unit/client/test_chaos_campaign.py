"""The chaos harness itself: same seed, same faults; the checker finds what is planted."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from k3ray.client.campaign import Campaign, seeded_asks
from k3ray.client.faults import ROLES, Fault, FaultKind, schedule
from k3ray.client.kimi import AsyncKimiClient
from k3ray.engine.request import Request
from k3ray.errors import ConfigError
from k3ray.ids import Role
from tests.support.endpoint import start_endpoint
from tests.support.scripted_router import ScriptedRouter, scripted_token


def test_a_seed_gives_the_same_faults() -> None:
    faults = schedule(7, 200)
    assert faults == schedule(7, 200)
    assert faults != schedule(8, 200)
    assert [f.number for f in faults] == list(range(1, 201))
    assert all(a.at_token < b.at_token for a, b in itertools.pairwise(faults))
    assert {f.role for f in faults} == set(ROLES)
    assert {f.kind for f in faults} == set(FaultKind)
    assert schedule(7, 10) == faults[:10], "a shorter campaign is the beginning of a longer one"


def test_a_victim_is_chosen_among_those_that_live() -> None:
    actors = [
        {"role": "expert_group", "id": f"group-{i}", "pid": 100 + i, "term": 1} for i in (2, 0, 1)
    ]
    fault = schedule(0, 1, roles=[Role.EXPERT_GROUP])[0]
    chosen = {
        Fault(number=1, at_token=1, role=fault.role, kind=fault.kind, choice=c).victim(actors)["id"]
        for c in (0.0, 0.4, 0.99)
    }
    assert chosen == {"group-0", "group-1", "group-2"}
    assert fault.victim([{**a, "pid": 0} for a in actors]) is None
    assert fault.victim([]) is None


@pytest.mark.parametrize("wrong", [{"roles": []}, {"kinds": []}, {"tokens_between": 0}])
def test_an_empty_campaign_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        schedule(0, 3, **wrong)


class Nodes:
    """Two real processes that are replaced when they die, as a status document shows them."""

    def __init__(self) -> None:
        self.terms = {"group-0": 0, "group-1": 0}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def status(self) -> dict[str, Any]:
        for actor in self.terms:
            process = self.processes.get(actor)
            if process is None or process.poll() is not None or self._stopped(process):
                if process is not None:
                    process.kill()
                    process.wait()
                self.processes[actor] = subprocess.Popen(["sleep", "1000"])
                self.terms[actor] += 1
        return {
            "state": "ready",
            "actors": [
                {"role": "expert_group", "id": a, "pid": self.processes[a].pid, "term": t}
                for a, t in self.terms.items()
            ],
        }

    def _stopped(self, process: subprocess.Popen[bytes]) -> bool:
        with open(f"/proc/{process.pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "T"


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    found = Nodes()
    yield found
    for process in found.processes.values():
        process.kill()
        process.wait()


class Planting(ScriptedRouter):
    """From its `after`-th token on, spoils one token of one stream."""

    def plant(self, what: str, after: int) -> None:
        self.what, self.left, self.skipped = what, after, ""
        self.token = self._token

    def _token(self, request: Request, position: int) -> int:
        self.left -= 1
        if self.left == 0:
            self.skipped = request.request_id
            if self.what == "altered":
                return 33 if scripted_token(request, position) == 32 else 32
        shift = {"lost": 1, "doubled": -1}.get(self.what, 0) if self.left <= 0 else 0
        return scripted_token(request, position + shift * (request.request_id == self.skipped))


def run_campaign(router: ScriptedRouter, nodes: Nodes) -> tuple[bool, dict[str, Any]]:
    endpoint = start_endpoint(router)
    planned = schedule(
        3, 6, roles=[Role.EXPERT_GROUP], kinds=[FaultKind.KILL, FaultKind.STOP], tokens_between=30
    )

    async def main() -> tuple[bool, dict[str, Any]]:
        async with AsyncKimiClient(endpoint.url) as client:
            campaign = Campaign(
                client=client, status=nodes.status, asks=seeded_asks(2, 20), whole_s=20.0
            )
            return await campaign.run(planned), campaign.report()

    try:
        return asyncio.run(main())
    finally:
        endpoint.stop()


def test_an_undamaged_campaign_passes(nodes: Nodes) -> None:
    unseen, report = run_campaign(ScriptedRouter(), nodes)
    assert unseen
    assert (report["faults"], report["lost"], report["doubled"], report["changed"]) == (6, 0, 0, 0)
    assert report["streams"] > 0
    assert sum(nodes.terms.values()) == 2 + 6, "every fault hit a process, once"


@pytest.mark.parametrize("what", ["lost", "doubled", "altered"])
def test_the_checker_finds_what_is_planted(nodes: Nodes, what: str) -> None:
    router = Planting()
    router.plant(what, after=60)  # the undisturbed runs have 40
    unseen, report = run_campaign(router, nodes)
    assert not unseen
    damage = {name: report[name] for name in ("lost", "doubled", "changed")}
    assert sum(damage.values()) > 0
    if what == "altered":
        assert damage == {"lost": 0, "doubled": 0, "changed": 1}
