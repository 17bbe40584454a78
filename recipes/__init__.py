"""Complete, runnable examples: each a trainer and a config, with what to expect of it."""
