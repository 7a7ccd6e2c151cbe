"""The last stage: a plan bound to buffers is captured, replayed, and its dead memory poisoned where one asks for it."""
