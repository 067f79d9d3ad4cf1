"""From what is typed to running ranks: reads the command line, starts the ranks, explains what went wrong."""
