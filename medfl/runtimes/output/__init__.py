"""What a run writes beside its numbers: events, tracking, pictures."""
