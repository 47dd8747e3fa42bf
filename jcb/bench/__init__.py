"""Benchmarks: each prints what it ran on, interleaves what it compares, and writes its numbers as JSON."""
