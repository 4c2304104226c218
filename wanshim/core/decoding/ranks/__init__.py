"""How the ranks of one decode work together: exchanges, verdicts and the collected output."""
