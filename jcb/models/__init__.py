"""Models: a params pytree, its declaration, and one pure forward function each."""
