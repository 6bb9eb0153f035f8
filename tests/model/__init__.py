"""The formal model of the protocol holds what it promises, and each of its mutants breaks a promise."""
