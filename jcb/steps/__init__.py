"""The jitted surface of jcb, all of it: device state, packed inputs, prefill, decode, sampling, and the registry."""
