"""Step 6, schedules: naive, GPipe and 1F1B as tables of a few lines, run by the same executor."""
