"""An inbox for stores whose only transaction is the conditional write of one document."""
