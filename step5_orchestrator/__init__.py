"""Step 5, the orchestrator: a schedule is a table of actions, and one executor runs any of them."""
