"""Step 4, the sharded model: a rank builds its own stage and nothing else."""
