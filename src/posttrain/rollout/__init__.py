"""Where completions come from: samplers, and the evaluation that uses one."""
