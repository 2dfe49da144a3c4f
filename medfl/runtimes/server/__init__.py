"""The server's half of a round: request, aggregate, score."""
