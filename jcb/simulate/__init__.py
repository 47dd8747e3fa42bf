"""The real scheduler on a pretended device and a pretended clock: no accelerator, no waiting."""
