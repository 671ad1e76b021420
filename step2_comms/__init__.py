"""Step 2, communication: ranks that know each other, and messages that arrive or say why not."""
