"""Step 0, the monolith: the whole model, in one process; all later steps must equal it."""
