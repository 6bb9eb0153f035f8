"""Side by side, in one interleaved run: what idemp costs beside the handler that a user would write without it."""
