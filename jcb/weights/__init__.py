"""From named arrays in a checkpoint to the params pytree of a model."""
