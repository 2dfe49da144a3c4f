"""The server's half of a round: ask, settle, score."""
