"""Records of the tables, as operators read and change them: the command line, telemetry and tests use them, no worker does."""
