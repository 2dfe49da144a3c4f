"""What the operating system holds a process to."""
