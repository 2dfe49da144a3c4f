"""Sites in this process and in worker processes."""
