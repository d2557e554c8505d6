"""Models that benchmarks and tests use: those of the papers."""
