"""Use: starting workers, here or under a launcher, and hosts that are emulated."""
