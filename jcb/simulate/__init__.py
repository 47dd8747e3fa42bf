"""The real scheduler on a pretended device and a pretended clock: no accelerator, no waiting.

setup.make_engine gives an engine for a model, a chip and a configuration; simulation.Simulation runs a workload
(workloads, traces, recorded) on one or many and returns stats.RunStats. replay runs a recording again, plan for plan;
what_if runs it under other knobs with step times from fit.
"""
