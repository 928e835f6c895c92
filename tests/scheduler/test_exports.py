import tidemill_scheduler


def test_the_public_names_are_these() -> None:
    assert tidemill_scheduler.__all__ == [
        "BlockCopy",
        "BlockId",
        "DuplicateSequence",
        "IntegrityError",
        "NeverFits",
        "PreemptionMode",
        "RestoreCosts",
        "Row",
        "Scheduler",
        "SchedulerConfig",
        "SchedulerError",
        "Sequence",
        "SequenceId",
        "StepPlan",
    ]
