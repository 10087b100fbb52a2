"""How a command ends, for scripts: the exit codes."""

EXIT_AGREE, EXIT_DISAGREE, EXIT_USAGE, EXIT_PORT, EXIT_NOTHING = 0, 1, 2, 3, 5
