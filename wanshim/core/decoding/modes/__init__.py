"""How a decode is spread over ranks: one file a mode, each with its plan and its run."""
