"""What graphify costs beside eager, hand-written CUDA graphs and other libraries: `python -m benchmarks`."""
