"""Who owns which page of the KV cache: integers and hashes only."""
