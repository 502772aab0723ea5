"""`python -m shardwise`: the command line."""

from shardwise.cli.app import main

if __name__ == "__main__":
    main()
