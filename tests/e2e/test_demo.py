"""`tidemill demo`: real summaries, through a queue and a worker that are gone afterwards."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.polling import until
from tests.e2e.processes import command_line

pytestmark = pytest.mark.timeout(180)
PACKAGES = 2
LAST_LINE = rf"{PACKAGES} documents, \d+ chunks?, \d+ tokens \(\d+ in, \d+ out\), \d+\.\d tokens/s"


class Demo:
    """A demo as it is started from a terminal: in a process group of its own, with a marked environment."""

    def __init__(self, cache_dir: Path, output: Path) -> None:
        self._mark = uuid.uuid4().hex
        self._cache_dir = cache_dir
        self._output = output
        with output.open("wb") as out, output.with_suffix(".err").open("wb") as err:
            self.process = subprocess.Popen(
                command_line("demo", "--packages", str(PACKAGES), "--cache-dir", str(cache_dir)),
                env={**os.environ, "DEMO_MARK": self._mark},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        return self._output.read_text()

    @property
    def err(self) -> str:
        return self._output.with_suffix(".err").read_text()

    def processes(self) -> list[psutil.Process]:
        """Everything it started that still runs, however far it moved away."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        """The queue's server overwrites its environment with its title, but lives in the cache folder."""
        try:
            marked = process.environ().get("DEMO_MARK") == self._mark
            return marked or Path(process.cwd()).is_relative_to(self._cache_dir)
        except psutil.Error:  # ended meanwhile, or another user's
            return False

    def close(self) -> None:
        for process in self.processes():
            process.kill()
        self.process.wait()


@pytest.fixture
def cache_dir(smollm2_folder: Path, tmp_path: Path) -> Path:
    """Holds the converted model already, and no queue yet."""
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / smollm2_folder.name).symlink_to(smollm2_folder)
    return folder


@pytest.fixture
def demos(cache_dir: Path, tmp_path: Path) -> Iterator[list[Demo]]:
    started: list[Demo] = []
    yield started
    for demo in started:
        demo.close()


def begin(demos: list[Demo], cache_dir: Path, tmp_path: Path) -> Demo:
    demos.append(Demo(cache_dir, tmp_path / f"demo-{len(demos)}"))
    return demos[-1]


async def test_the_demo_stops_and_goes_on_and_leaves_no_process(
    demos: list[Demo], cache_dir: Path, tmp_path: Path
) -> None:
    interrupted = begin(demos, cache_dir, tmp_path)
    await until(lambda: "# " in interrupted.out, timeout=90)
    assert len(interrupted.processes()) >= 4, "demo, queue, worker and summarize"
    os.killpg(interrupted.process.pid, signal.SIGINT)
    assert interrupted.process.wait(30) == 130, interrupted.err
    assert "Traceback" not in interrupted.err
    assert interrupted.processes() == []

    finished = begin(demos, cache_dir, tmp_path)
    assert finished.process.wait(120) == 0, finished.err
    lines = finished.out.splitlines()
    assert sum(line.startswith("# ") for line in lines) == PACKAGES
    found = re.fullmatch(LAST_LINE + r", (\d+) of (\d+) jobs from an earlier run", lines[-1])
    assert found, lines[-1]
    assert 1 <= int(found[1]) <= int(found[2])
    assert "Traceback" not in finished.err
    assert finished.processes() == []
