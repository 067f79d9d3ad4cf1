"""Where a run is written down: its files, the terminal, wandb, and the tables and figures of notebooks."""
