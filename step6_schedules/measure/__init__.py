"""What `make bench` measures, one figure or one family of figures a file; see bench.py and cost.md."""
