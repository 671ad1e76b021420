"""The search behind `--schedule auto`."""
