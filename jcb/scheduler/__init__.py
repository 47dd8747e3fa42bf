"""Requests in, step plans out: who runs in the next step, with which pages."""
