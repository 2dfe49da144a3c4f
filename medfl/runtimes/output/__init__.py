"""What a run writes besides its numbers: events, tracking, pictures."""
