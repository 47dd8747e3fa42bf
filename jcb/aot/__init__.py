"""Compiling for chips that are not here: what a configuration will need of a TPU or GPU, known before renting one."""
