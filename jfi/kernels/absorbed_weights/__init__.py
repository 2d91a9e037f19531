"""Products of the projection weights of multi-head target attention."""
