"""What the notebooks share: pictures, data, and programs on several ranks."""
