"""Pictures of attention, embeddings and scores: functions from numbers to a figure, and ``style`` for its bytes."""
