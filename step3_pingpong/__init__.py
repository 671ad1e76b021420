"""Step 3, ping-pong: one activation there, one gradient back, and what a message costs."""
