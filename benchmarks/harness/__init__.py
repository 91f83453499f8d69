"""What the benchmarks share: cases and their arithmetic, fresh processes, contenders, models, probes, tables."""
