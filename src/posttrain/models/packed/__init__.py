"""What gdn_packing is made of: transformers' internals are touched here and nowhere else."""
