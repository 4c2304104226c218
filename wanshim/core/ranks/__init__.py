"""Where ranks meet: rounds in a store, agreement, deadlines, one error for all. Importing this imports no torch."""
