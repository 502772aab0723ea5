"""Use: the `shardwise` command."""
