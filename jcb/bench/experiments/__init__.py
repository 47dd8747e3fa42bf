"""Questions about continuous batching with measured and drawn answers: the production scheduler, simulated or real."""
