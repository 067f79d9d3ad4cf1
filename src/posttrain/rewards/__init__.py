"""What scores a completion. Nothing here imports torch: rewards that may hang run in worker processes."""
