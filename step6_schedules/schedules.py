"""All schedules by name."""

from step5_orchestrator.naive import naive
from step5_orchestrator.program import schedule_options
from step6_schedules.gpipe import gpipe
from step6_schedules.one_f_one_b import one_f_one_b

SCHEDULES = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b}
ScheduleOptions = schedule_options(SCHEDULES, "1f1b")
