"""What the rest of the package has to know of sharded leaves: meshes, placements, and the tensor of one's own shard."""
