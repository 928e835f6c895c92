"""The public names of the distribution change on purpose only."""

import subprocess
import sys

import tidemill


def test_the_public_names_are_these() -> None:
    assert sorted(tidemill.__all__) == [
        "BlockingClient",
        "Choice",
        "Client",
        "ClientSettings",
        "ConfigurationError",
        "Delta",
        "ErrorCode",
        "FinishReason",
        "InvalidJob",
        "Job",
        "JobConflict",
        "JobFailed",
        "JobId",
        "JobUnknown",
        "Message",
        "Priority",
        "QueueFull",
        "QueueUnavailable",
        "Result",
        "SamplingParams",
        "Status",
        "StructuredOutputs",
        "TidemillError",
    ]


def test_every_public_name_can_be_had() -> None:
    assert all(getattr(tidemill, name) is not None for name in tidemill.__all__)


def test_the_contract_alone_loads_no_redis() -> None:
    program = "import sys, tidemill; tidemill.Job(prompt='x'); print('redis' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
