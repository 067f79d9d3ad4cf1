"""What can be known of a run before it is paid for: the parts of recipes/preflight.py, each a function of its own."""
