"""What graphify costs beside eager and hand-written CUDA graphs: `python -m benchmarks.dispatch`."""
