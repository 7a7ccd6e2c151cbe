"""Sharded leaves as the rest of the package sees them: meshes, placements and shard tensors."""
