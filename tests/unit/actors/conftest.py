"""Running a scenario on a controller bench."""

import asyncio

import pytest

from tests.support.controller_bench import Bench


@pytest.fixture
def run(tmp_path):
    """Run a coroutine function on a bench; every process is ended after it."""

    def runner(scenario, folder=tmp_path):
        async def main():
            bench = Bench(folder)
            try:
                await scenario(bench)
            finally:
                await bench.core.stop()
            assert bench.actors.processes == {}

        asyncio.run(main())

    return runner
