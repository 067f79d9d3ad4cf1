"""Tables over every causal language model of transformers, on tiny models of each: packing, FLOPs."""
