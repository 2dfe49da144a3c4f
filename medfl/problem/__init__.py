"""What a federation trains, as a value: networks, loss, optimiser, data, and how results are scored."""
