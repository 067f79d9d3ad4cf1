"""What training needs beside the algorithm: the prepared policy, sharding, optimizer, reference, checkpoints."""
