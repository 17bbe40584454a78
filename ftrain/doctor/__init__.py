"""`ftrain doctor`: what would stop a run on this host, tried as a run would do it."""
