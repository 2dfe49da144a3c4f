"""From a request to a finished run folder: plan, launch, resume, read back."""
