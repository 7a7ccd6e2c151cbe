"""The systems that the bench compares: ours and its opponents, each as one would write it there."""
