"""A server without memory to spare: what runs is finished, nothing more is begun, and it can be seen."""

from __future__ import annotations

from structlog.testing import capture_logs

from tests.tidemill.servers import running, valkey_binary
from tests.worker.factories import FakeEngine, Place, eventually, expected_tokens, make_job, running_worker
from tests.worker.test_metrics import value


async def test_a_full_server_pauses_the_intake_alone() -> None:
    begun = make_job("Mill", metadata={"row": "7" * 20_000})  # as large a result, which nobody reads
    waiting = [make_job(f"Tide {n}") for n in range(3)]
    with running(valkey_binary()) as server, server.client() as admin, capture_logs() as logs:
        place = Place(server.url, "full")
        engine = FakeEngine(paced=True)
        async with running_worker(place, engine=engine, capacity=1) as worker, place.client() as client:
            for job in (begun, *waiting):
                await client.submit(job)
            await eventually(lambda: engine.seen)
            admin.config_set("maxmemory", "100kb")  # a tenth of what an empty server takes
            engine.free()
            result = await client.result(begun.id, timeout=10)
            assert result.token_ids == expected_tokens(begun, begun.params.max_tokens)

            def failures() -> float:
                return value(worker.metrics, "tidemill_redis_failures_total", reason="out_of_memory")

            await eventually(lambda: failures() >= 3)
            assert value(worker.metrics, "tidemill_intake_paused") == 1
            assert len(engine.seen) == 1
            admin.config_set("maxmemory", "0")
            for job in waiting:
                await client.result(job.id, timeout=10)
            await eventually(lambda: value(worker.metrics, "tidemill_intake_paused") == 0)
    events = [entry["event"] for entry in logs]
    assert (events.count("claim_failed"), events.count("claims_resumed")) == (1, 1)


async def test_results_that_wait_for_redis_are_counted() -> None:
    with running(valkey_binary(), "--appendonly", "yes", "--appendfsync", "always") as server:
        place = Place(server.url, "away")
        engine = FakeEngine(paced=True)
        jobs = [make_job(f"Mill {n}") for n in range(3)]
        async with running_worker(place, engine=engine) as worker, place.client() as client:
            for job in jobs:
                await client.submit(job)
            await eventually(lambda: len(engine.seen) == 3)
            server.kill()
            engine.free()
            await eventually(lambda: value(worker.metrics, "tidemill_results_waiting") == 3)
            await eventually(lambda: value(worker.metrics, "tidemill_results_waiting_bytes") > 100)
            await eventually(lambda: value(worker.metrics, "tidemill_intake_paused") == 1)
            unreachable = value(worker.metrics, "tidemill_redis_failures_total", reason="unreachable")
            assert unreachable > 0
            server.start()
            for job in jobs:
                await client.result(job.id, timeout=20)
            await eventually(lambda: value(worker.metrics, "tidemill_results_waiting") == 0)
            assert value(worker.metrics, "tidemill_results_waiting_bytes") == 0
