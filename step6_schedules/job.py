"""What step 6 brings to the common training program: all schedules, and stages that can split their backward."""

from step5_orchestrator.program import Job
from step6_schedules.choose import ScheduleOptions, choose, cost_of
from step6_schedules.split_backward import SplitStage


def job_of(module: str, description: str) -> Job:
    """The job of a program of step 6."""
    return Job(module, description, ScheduleOptions, choose, cost_of, SplitStage)
