"""Named benchmarks whose figures the documentation may quote; start them with `python benchmarks/run.py`."""
