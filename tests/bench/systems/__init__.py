"""The systems that the bench compares: ours and its opponents, each in its idiomatic form."""
