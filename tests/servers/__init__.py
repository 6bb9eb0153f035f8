"""Real servers for the tests: private ones on loopback ports, that end with the test run."""
