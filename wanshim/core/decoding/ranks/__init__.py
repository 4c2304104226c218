"""The work of the ranks of one decode: exchanges, verdicts and the collected output."""
