"""Which site has which image: rules, counts, drawing, tables."""
