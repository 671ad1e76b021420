"""Step 1, the partition: which layers belong to which stage, and where autograd is cut and joined again."""
