"""The pages on the testing kit do what they say."""
