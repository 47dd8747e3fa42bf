"""The engine: admission, the step loop, output text, and its offline and asynchronous fronts."""
