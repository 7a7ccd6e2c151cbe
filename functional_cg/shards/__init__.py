"""Sharded leaves, as the rest of the package sees them: meshes, placements, and the tensor of a rank's shard."""
