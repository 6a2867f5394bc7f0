"""The store for others: torch datasets, export to and import from the layouts of other projects."""
