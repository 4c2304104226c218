"""The meeting of ranks: rounds in a store, agreement, deadlines, one error for all. Importing this imports no torch."""
