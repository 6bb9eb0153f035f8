"""What doctor finds broken on live servers, and that what it names mends it."""
